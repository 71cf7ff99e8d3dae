#include "tools/driver.h"

#include <gtest/gtest.h>

#include "exec/test_model.h"
#include "tools/cost.h"

namespace mi::tools {
namespace {

TEST(DriverTest, StepsAreThoseOfTheLoop) {
  const exec::testing::TestModel model({});
  hw::ThreadPool pool(1);
  exec::LoadOptions o;
  o.max_tokens_per_step = 16;
  const auto engine = model.load(pool, o);
  Driver d(*engine);
  std::vector<StepShape> steps;
  std::vector<std::vector<int32_t>> ids;
  d.before_step = [&](const exec::Batch& b) {
    steps.push_back(shape_of(b));
    ids.emplace_back();
    for (const exec::Chunk& c : b.chunks) ids.back().insert(ids.back().end(), c.tokens.begin(), c.tokens.end());
  };
  d.start(3, 10, 4, 1);
  d.prefill();
  ASSERT_EQ(steps.size(), 2u) << "30 tokens in steps of 16";
  EXPECT_EQ(steps[0].tokens(), 16);
  EXPECT_EQ(steps[0].logits(), 1) << "the second prompt is not done";
  EXPECT_EQ(steps[1].tokens(), 14);
  EXPECT_EQ(steps[1].logits(), 2);
  EXPECT_EQ(steps[1].parts[0].start, 6);
  EXPECT_FALSE(d.prefill_step());
  d.decode(3);
  ASSERT_EQ(steps.size(), 5u);
  for (size_t i = 2; i < 5; ++i) {
    EXPECT_EQ(steps[i].tokens(), 3);
    EXPECT_EQ(steps[i].logits(), 3);
    EXPECT_EQ(steps[i].parts[2].start, int64_t(10 + i - 2));
  }
  const auto first = ids;
  ids.clear();
  d.start(3, 10, 4, 1);
  d.prefill();
  d.decode(3);
  EXPECT_EQ(ids, first) << "the same seed, the same prompts, the same tokens";
  ids.clear();
  d.start(3, 10, 4, 2);
  d.prefill();
  EXPECT_NE(ids[0], first[0]);
  EXPECT_EQ(Driver::pages_needed(3, 65), 6);
}

}  // namespace
}  // namespace mi::tools
