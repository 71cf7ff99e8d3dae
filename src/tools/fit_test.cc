#include "tools/fit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace mi::tools {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t(1) << 20;

// The worked example's caches: 48 layers of 8 KV heads of 128; weights of 8 bits.
struct FitTest : ::testing::Test {
  artifact::Manifest m;
  FitQuestion q;
  FitTest() {
    m.caches.assign(48, {8, 128, 128, 0, 0});
    m.model.precision = "w8a8";
    m.memory.weight_bytes = 4000 * kMiB;
    m.memory.activation_bytes_per_token = 100 * 1024;
    q.manifest = &m;
    q.batch = 32;
    q.seq = 4096;
    q.load.max_tokens_per_step = 2048;
    q.room = 16000 * kMiB;
  }
};

TEST_F(FitTest, AllFitsWhereThereIsRoom) {
  q.room = 100000 * kMiB;
  EXPECT_EQ(pages_that_fit(q), 32 * 64);
  EXPECT_EQ(pages_wanted(q), 32 * 64);
  EXPECT_EQ(exec::kv_page_bytes(m, "bf16") * 32 * 64, int64_t(2) * 2 * 48 * 8 * 128 * 4096 * 32);
}

TEST_F(FitTest, TheFractionOfWhatTheRestLeaves) {
  // 16000 MiB less weights, 2048 rows of activations and a MiB of scratch.
  const double left = 16000.0 - 4000 - 2048 * 100.0 / 1024 - 1;
  EXPECT_EQ(pages_that_fit(q), int64_t(left * 0.6 * double(kMiB)) / exec::kv_page_bytes(m, "bf16"));
  q.kv_fraction = 0.3;
  EXPECT_NEAR(double(pages_that_fit(q)), left * 0.3 / 12, 1);
}

// What each way promises is true: with it alone, all fits.
TEST_F(FitTest, EachWayAloneIsEnough) {
  const std::string ways = what_would_fit(q);
  const auto number = [&](const std::string& flag) {
    const size_t at = ways.find(flag + " ");
    EXPECT_NE(at, std::string::npos) << flag << " in: " << ways;
    return std::stoll(ways.substr(at + flag.size() + 1));
  };
  for (const auto& [flag, field] : {std::pair("--max-batch-size", &FitQuestion::batch), std::pair("--max-seq-len", &FitQuestion::seq)}) {
    FitQuestion less = q;
    less.*field = number(flag);
    EXPECT_EQ(pages_that_fit(less), pages_wanted(less)) << flag;
    less.*field += less.*field == less.seq ? 64 : 1;
    EXPECT_LT(pages_that_fit(less), pages_wanted(less)) << "more would fit than " << flag << " says";
  }
  EXPECT_THAT(ways, ::testing::Not(HasSubstr("--kv-type"))) << "12.9 GB of int8 do not fit either";
  EXPECT_THAT(ways, ::testing::Not(HasSubstr("4 bits"))) << ways;
  EXPECT_THAT(ways, ::testing::Not(HasSubstr("--expert-cache"))) << "there are no experts";
}

TEST_F(FitTest, SmallerNumbersWhereTheyAreEnough) {
  q.room = 26000 * kMiB;
  EXPECT_THAT(what_would_fit(q), HasSubstr("--kv-type int8"));
  q.load.kv_type = "int8";
  EXPECT_EQ(pages_that_fit(q), pages_wanted(q));
  q.load.kv_type = "f32";
  EXPECT_THAT(what_would_fit(q), HasSubstr("--kv-type int8")) << "bf16 is not enough";
  q.load.kv_type = "";
  q.batch = 2;
  q.seq = 1024;
  q.room = 4500 * kMiB;
  EXPECT_THAT(what_would_fit(q), HasSubstr("weights of 4 bits (quantize to W4A8: about 2.23 GB instead of 4.19 GB)"));
  m.model.precision = "w4a8";
  EXPECT_THAT(what_would_fit(q), ::testing::Not(HasSubstr("bits")));
  q.room = 100 * kMiB;
  EXPECT_EQ(what_would_fit(q), "") << "nothing alone is enough";
  EXPECT_LT(pages_that_fit(q), 1);
}

}  // namespace
}  // namespace mi::tools
