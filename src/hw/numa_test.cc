#include "hw/numa.h"
#include "base/temp_dir.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <numeric>

namespace mi::hw {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int64_t kGB = int64_t(1) << 30;

std::vector<int> range(int first, int last) {
  std::vector<int> v(size_t(last - first + 1));
  std::iota(v.begin(), v.end(), first);
  return v;
}

class MadeUpNodes : public testing::Test {
 protected:
  void put(const std::string& path, const std::string& text) {
    const fs::path p = root_ / "sys/devices/system/node" / path;
    fs::create_directories(p.parent_path());
    std::ofstream(p) << text << "\n";
  }
  void node(int id, const std::string& cpus, int64_t free_kb) {
    const std::string dir = "node" + std::to_string(id) + "/";
    put(dir + "cpulist", cpus);
    put(dir + "meminfo", "Node " + std::to_string(id) + " MemTotal:  999999999 kB\nNode " + std::to_string(id) +
                             " MemFree:       " + std::to_string(free_kb) + " kB");
  }
  const TempDir dir_;
  const fs::path root_ = dir_.path();
};

TEST_F(MadeUpNodes, AreRead) {
  EXPECT_THAT(memory_nodes(root_, range(0, 7)), IsEmpty());
  put("online", "0-1,4");
  node(0, "0-3,8", 1000);
  node(1, "4-7", 2000);
  node(4, "", 3000);
  const auto nodes = memory_nodes(root_, {1, 2, 5, 8});
  ASSERT_EQ(nodes.size(), 3u);
  EXPECT_THAT(nodes[0].cpus, ElementsAre(1, 2, 8));
  EXPECT_THAT(nodes[1].cpus, ElementsAre(5));
  EXPECT_EQ(nodes[1].free_bytes, 2000 * 1024);
  EXPECT_EQ(nodes[2].id, 4);
  EXPECT_THAT(nodes[2].cpus, IsEmpty());
}

TEST_F(MadeUpNodes, DamagedListsEnd) {
  put("online", "0,x,99999999999999999999");
  node(0, "3-1,0-999999999", 5);
  const auto nodes = memory_nodes(root_, {0, 1});
  ASSERT_EQ(nodes.size(), 1u);
  EXPECT_THAT(nodes[0].cpus, IsEmpty());
}

TEST(NumaPlanTest, OneNodeDecidesNothing) {
  const NumaPlan p = plan_numa({{0, range(0, 3), kGB}}, 4, kGB);
  EXPECT_THAT(p.weight_nodes, IsEmpty());
  EXPECT_THAT(p.worker_cpus, IsEmpty());
  EXPECT_THAT(plan_numa({}, 4, kGB).worker_cpus, IsEmpty());
}

TEST(NumaPlanTest, WhatFitsIntoANodeStaysInIt) {
  const std::vector<MemoryNode> nodes = {{0, range(0, 7), 20 * kGB}, {1, range(8, 15), 40 * kGB}};
  const NumaPlan p = plan_numa(nodes, 8, 10 * kGB);
  EXPECT_THAT(p.weight_nodes, ElementsAre(1));
  ASSERT_EQ(p.worker_cpus.size(), 8u);
  for (const auto& cpus : p.worker_cpus) EXPECT_EQ(cpus, range(8, 15));
}

TEST(NumaPlanTest, MoreThreadsThanANodeHasAreSpreadInProportion) {
  const std::vector<MemoryNode> nodes = {
      {0, range(0, 7), 40 * kGB}, {1, range(8, 11), 40 * kGB}, {2, {}, 400 * kGB}, {3, {12}, 40 * kGB}};
  const NumaPlan p = plan_numa(nodes, 12, 10 * kGB);
  EXPECT_THAT(p.weight_nodes, ElementsAre(0, 1));
  ASSERT_EQ(p.worker_cpus.size(), 12u);
  EXPECT_EQ(std::count(p.worker_cpus.begin(), p.worker_cpus.end(), range(0, 7)), 8);
  EXPECT_EQ(std::count(p.worker_cpus.begin(), p.worker_cpus.end(), range(8, 11)), 4);
}

TEST(NumaPlanTest, WeightsTooLargeForANodeGoOverMore) {
  const std::vector<MemoryNode> nodes = {{0, range(0, 7), 20 * kGB}, {1, range(8, 15), 20 * kGB}};
  EXPECT_THAT(plan_numa(nodes, 4, 30 * kGB).weight_nodes, ElementsAre(0, 1));
  // Larger than all nodes with CPUs: memory without CPUs too.
  const std::vector<MemoryNode> more = {{0, range(0, 7), 20 * kGB}, {1, range(8, 15), 20 * kGB}, {2, {}, 90 * kGB}};
  EXPECT_THAT(plan_numa(more, 4, 60 * kGB).weight_nodes, ElementsAre(0, 1, 2));
}

TEST(NumaPlanTest, NoCpuOfOurs) {
  const NumaPlan p = plan_numa({{0, {}, kGB}, {1, {}, kGB}}, 2, kGB);
  EXPECT_THAT(p.worker_cpus, IsEmpty());
  EXPECT_THAT(p.reason, HasSubstr("no memory node"));
}

double read_from(int node, const std::vector<double>& loads, const std::vector<int>& nodes) {
  double sum = 0;
  for (size_t i = 0; i < loads.size(); ++i) sum += nodes[i] == node ? loads[i] : 0;
  return sum;
}

TEST(ShareParts, EachNodeIsReadFromEquallyMuchAndHoldsEquallyMany) {
  // Every second part is hot: dealt out in turn, one of two nodes would be read from nine times as much as the other.
  std::vector<double> loads;
  for (int i = 0; i < 40; ++i) loads.push_back(i % 2 == 0 ? 9 : 1);
  const auto two = share_parts(loads, {0, 3});
  EXPECT_EQ(read_from(0, loads, two), read_from(3, loads, two));
  EXPECT_EQ(std::count(two.begin(), two.end(), 0), 20);
  const auto three = share_parts(loads, {0, 1, 2});
  for (const int n : {0, 1, 2}) {
    EXPECT_NEAR(read_from(n, loads, three), 200.0 / 3, 9);
    EXPECT_NEAR(double(std::count(three.begin(), three.end(), n)), 40.0 / 3, 1);
  }
}

TEST(ShareParts, ColdPartsDoNotAllGoToOneNode) {
  std::vector<double> loads(10, 0);
  loads[0] = 100;
  const auto nodes = share_parts(loads, {0, 1});
  EXPECT_EQ(std::count(nodes.begin(), nodes.end(), 0), 5);
  EXPECT_THAT(share_parts({}, {0, 1}), IsEmpty());
  EXPECT_THAT(share_parts({1, 2, 3}, {7}), ElementsAre(7, 7, 7));
}

}  // namespace
}  // namespace mi::hw
