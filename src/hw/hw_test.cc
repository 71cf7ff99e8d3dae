#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <thread>

#include "base/temp_dir.h"
#include "hw/cpu.h"
#include "hw/cpu_quota.h"
#include "hw/thread_pool.h"

namespace mi::hw {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

TEST(CpuTest, ForceCapsTheLadder) {
  CpuFeatures all{true, true, true, true, true, true, true};
  EXPECT_EQ(describe(*apply_force(all, "scalar")), "scalar");
  EXPECT_EQ(describe(*apply_force(all, "avx2")), "avx2");
  EXPECT_EQ(describe(*apply_force(all, "avx512")), "avx2 avx512");
  EXPECT_FALSE(apply_force(all, "avx512vnni")->amx_int8);
  EXPECT_TRUE(apply_force(all, "avx512vnni")->avx512_vnni);
  EXPECT_TRUE(apply_force(all, "amx")->amx_int8);
  EXPECT_FALSE(apply_force(CpuFeatures{}, "amx")->amx_int8);     // forcing adds nothing
}

TEST(CpuTest, UnknownForceIsRefused) {
  const auto r = apply_force({}, "avx521");
  ASSERT_FALSE(r.ok());
  EXPECT_EQ(r.error().code(), ErrorCode::kUsage);
  EXPECT_THAT(r.error().message(), HasSubstr("avx512"));
}

TEST(ThreadPoolTest, EveryTaskOnce) {
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    for (int64_t tasks : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> seen(static_cast<size_t>(tasks));
      std::atomic<int> bad_worker{0};
      pool.run(tasks, [&](int64_t t, int worker) {
        ++seen[size_t(t)];
        if (worker < 0 || worker >= threads) ++bad_worker;
      });
      for (auto& s : seen) EXPECT_EQ(s, 1);
      EXPECT_EQ(bad_worker, 0);
    }
  }
}

TEST(ThreadPoolTest, CountsTheJobsThatCallTheWorkers) {
  ThreadPool pool(2), alone(1);
  for (ThreadPool* p : {&pool, &alone}) {
    for (int64_t tasks : {0, 1, 2, 5}) p->run(tasks, [](int64_t, int) {});
    EXPECT_EQ(p->jobs(), p == &pool ? 2 : 0) << "one task, or one thread, calls nobody";
  }
}

TEST(ThreadPoolTest, ManySmallJobsSeeEachOthersWrites) {
  ThreadPool pool(3);
  std::vector<int64_t> sums(16, 0);
  for (int round = 0; round < 5000; ++round) pool.run(16, [&](int64_t t, int) { sums[size_t(t)] += t; });
  for (int64_t t = 0; t < 16; ++t) EXPECT_EQ(sums[size_t(t)], 5000 * t);
}

TEST(ThreadPoolTest, JobsAfterSleepAndDestructionRightAfterAJob) {
  for (int round = 0; round < 50; ++round) {
    ThreadPool pool(3);
    std::atomic<int> sum{0};
    pool.run(3, [&](int64_t t, int) { sum += int(t); });
    if (round % 2) std::this_thread::sleep_for(std::chrono::microseconds(200));      // workers asleep, or just about to be
    pool.run(100, [&](int64_t t, int) { sum += int(t); });
    EXPECT_EQ(sum, 3 + 4950);
  }
}

TEST(ThreadPoolTest, WorkersTakePart) {
  // Tasks that wait for each other end only when as many workers run them.
  ThreadPool pool(4);
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> inside{0};
    pool.run(4, [&](int64_t, int) {
      ++inside;
      while (inside < 4) std::this_thread::yield();
    });
    EXPECT_EQ(inside, 4);
  }
}

TEST(ThreadPoolTest, IdleWorkersUseNoCpu) {
  ThreadPool pool(4);
  pool.run(4, [](int64_t, int) {});
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  rusage before{}, after{};
  getrusage(RUSAGE_SELF, &before);
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  getrusage(RUSAGE_SELF, &after);
  const auto us = [](const rusage& r) { return (r.ru_utime.tv_sec + r.ru_stime.tv_sec) * 1000000L + r.ru_utime.tv_usec + r.ru_stime.tv_usec; };
  EXPECT_LT(us(after) - us(before), 250000);       // half a core would be a spin; asleep it is next to nothing
}

TEST(ThreadPoolDeathTest, NestedCallIsABug) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        ThreadPool pool(1);
        pool.run(2, [&](int64_t, int) { pool.run(1, [](int64_t, int) {}); });
      },
      "called twice");
}

class Quota : public testing::Test {
 protected:
  void put(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text << "\n";
  }
  const TempDir dir_;
  const fs::path root_ = dir_.path();
};

TEST_F(Quota, NoneWithoutFiles) { EXPECT_FALSE(cpu_quota(root_)); }

TEST_F(Quota, V2TakesTheLeastOfAllParents) {
  put("proc/self/cgroup", "0::/a/b");
  put("sys/fs/cgroup/a/b/cpu.max", "max 100000");
  put("sys/fs/cgroup/a/cpu.max", "765000 100000");
  put("sys/fs/cgroup/cpu.max", "1600000 100000");
  EXPECT_DOUBLE_EQ(*cpu_quota(root_), 7.65);
}

TEST_F(Quota, V1WithJoinedControllers) {
  put("proc/self/cgroup", "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x");
  put("sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us", "200000");
  put("sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us", "100000");
  put("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1");
  put("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000");
  EXPECT_DOUBLE_EQ(*cpu_quota(root_), 2.0);
}

TEST_F(Quota, AdviceRoundsDownAndSaysWhy) {
  EXPECT_EQ(advise_from(16, 7.65).threads, 7);
  EXPECT_THAT(advise_from(16, 7.65).reason, HasSubstr("7.65"));
  EXPECT_EQ(advise_from(4, 7.65).threads, 4);
  EXPECT_EQ(advise_from(4, std::nullopt).threads, 4);
  EXPECT_EQ(advise_from(4, 0.5).threads, 1);
  EXPECT_GE(advise_threads().threads, 1);
}

}  // namespace
}  // namespace mi::hw
