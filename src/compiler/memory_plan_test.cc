#include "compiler/memory_plan.h"

#include <gtest/gtest.h>

#include "base/util.h"

namespace mi::compiler {
namespace {

artifact::Buffer buffer(int64_t bytes, int32_t first, int32_t last) {
  artifact::Buffer b;
  b.name = fmt::format("b{}-{}", first, last);
  b.row_stride = bytes;
  b.first_instr = first;
  b.last_instr = last;
  return b;
}

std::vector<artifact::Buffer> random_buffers(uint64_t seed) {
  std::vector<artifact::Buffer> buffers;
  const uint64_t count = 1 + random_u64(seed, 0) % 60, instrs = 1 + random_u64(seed, 1) % 80;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t first = random_u64(seed, 10 * i + 2) % instrs,
                   length = random_u64(seed, 10 * i + 3) % (random_u64(seed, 10 * i + 4) % 4 == 0 ? instrs : 5);
    buffers.push_back(buffer(64 * int64_t(1 + random_u64(seed, 10 * i + 5) % 100), int32_t(first),
                             int32_t(std::min(instrs - 1, first + length))));
    buffers.back().rows_per_token = 1 + int64_t(random_u64(seed, 10 * i + 6) % 8);
  }
  return buffers;
}

TEST(MemoryPlan, WithoutSharingEveryBufferHasItsPlace) {
  std::vector<artifact::Buffer> buffers(3);
  for (int32_t i = 0; i < 3; ++i) {
    buffers[size_t(i)].row_stride = 64 * (i + 1);
    buffers[size_t(i)].first_instr = buffers[size_t(i)].last_instr = i;
  }
  EXPECT_EQ(plan_memory(buffers, false), 64 * 6);
  EXPECT_EQ(buffers[2].offset_per_token, 64 * 3);
  EXPECT_TRUE(verify_memory_plan(buffers, 64 * 6).ok());
  EXPECT_EQ(plan_memory(buffers), 64 * 3);
}

TEST(MemoryPlan, RandomLifetimesNeverOverlap) {
  double unshared = 0, planned = 0;
  for (uint64_t seed = 0; seed < 500; ++seed) {
    auto buffers = random_buffers(seed);
    const int64_t arena = plan_memory(buffers);
    const Status s = verify_memory_plan(buffers, arena);
    ASSERT_TRUE(s.ok()) << "seed " << seed << ": " << s.error().message();
    ASSERT_GE(arena, peak_bytes(buffers));
    ASSERT_LE(arena, unshared_bytes(buffers));
    unshared += double(unshared_bytes(buffers));
    planned += double(arena) / double(peak_bytes(buffers));
  }
  EXPECT_LT(planned / 500, 1.2);  // first fit by size stays near the least possible
}

TEST(MemoryPlan, AChainNeedsTwoBuffers) {
  std::vector<artifact::Buffer> buffers;
  for (int32_t i = 0; i < 10; ++i) buffers.push_back(buffer(128, i, i + 1));
  EXPECT_EQ(plan_memory(buffers), 256);
  EXPECT_EQ(peak_bytes(buffers), 256);
  EXPECT_EQ(unshared_bytes(buffers), 1280);
}

TEST(MemoryPlan, VerifierFindsEveryPlantedOverlap) {
  int planted = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    auto buffers = random_buffers(seed);
    const int64_t arena = plan_memory(buffers);
    for (size_t i = 0; i < buffers.size(); ++i)
      for (size_t j = 0; j < buffers.size(); ++j) {
        if (i == j || buffers[i].first_instr > buffers[j].last_instr || buffers[j].first_instr > buffers[i].last_instr)
          continue;
        auto broken = buffers;
        broken[i].offset_per_token =
            broken[j].offset_per_token + broken[j].row_stride * broken[j].rows_per_token - 64;  // shares the last line
        ASSERT_FALSE(verify_memory_plan(broken, int64_t(1) << 40).ok())
            << "seed " << seed << ", buffers " << i << " and " << j;
        ++planted;
        break;
      }
    ASSERT_FALSE(verify_memory_plan(buffers, arena - 64).ok());
    buffers[0].offset_per_token += 1;
    ASSERT_FALSE(verify_memory_plan(buffers, int64_t(1) << 40).ok());
  }
  EXPECT_GT(planted, 1000);
}

}  // namespace
}  // namespace mi::compiler
