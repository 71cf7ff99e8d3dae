#include "tools/profile/expert_profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/util.h"
#include "base/temp_dir.h"
#include "exec/test_model.h"

namespace mi::tools {
namespace {

using exec::testing::ModelShape;
using exec::testing::TestModel;
using ::testing::HasSubstr;

// One layer of 16 experts, two chosen by each token. hot: of a hundred, choices that fall on the first two experts.
ExpertProfile traffic(uint64_t hot, int64_t tokens = 2000) {
  ExpertProfile p{"test", "test", tokens, {{3, 16, 2, {}}}};
  for (int64_t t = 0; t < tokens; ++t) {
    int32_t a, b;
    if (random_u64(1, uint64_t(t)) % 100 < hot) {
      a = 0, b = 1;
    } else {
      a = int32_t(random_u64(2, uint64_t(t)) % 16);
      b = int32_t((uint64_t(a) + 1 + random_u64(3, uint64_t(t)) % 15) % 16);
    }
    p.layers[0].ids.insert(p.layers[0].ids.end(), {std::min(a, b), std::max(a, b)});
  }
  return p;
}

TEST(ExpertProfile, EvidenceOfSkewAndOfNone) {
  const ExpertEvidence even = weigh_experts(traffic(0)), hot = weigh_experts(traffic(50));
  EXPECT_LT(even.layers[0].skew, 1.3);
  EXPECT_GT(hot.layers[0].skew, 3.5);
  EXPECT_NEAR(even.covered[1], 0.25, 0.04) << "four of sixteen";
  EXPECT_NEAR(even.even[1], 0.25, 1e-9);
  EXPECT_GT(hot.covered[1], 0.55);
  ASSERT_EQ(even.caches.size(), 4u);
  EXPECT_NEAR(even.caches[2].plain, 0.5, 0.06) << "half of the experts, all alike";
  EXPECT_NEAR(even.caches[2].prior, even.caches[2].plain, 0.03) << "nothing to know beforehand";
  EXPECT_GT(hot.caches[0].prior, 0.4) << "room for two: those that half of the tokens choose, which others push out";
  EXPECT_GE(hot.caches[0].prior, hot.caches[0].plain);
  EXPECT_THAT(expert_evidence_text(traffic(50), hot), HasSubstr("judged on the second"));
}

TEST(ExpertProfile, RecordsWhatTheRouterChoseAndReadsItBack) {
  const TestModel model(ModelShape{});
  hw::ThreadPool pool(2);
  exec::LoadOptions o;
  o.max_tokens_per_step = 7;  // sequences in several steps
  const auto engine = model.load(pool, o);
  std::vector<std::vector<int32_t>> sequences(3);
  for (size_t s = 0; s < 3; ++s)
    for (uint64_t i = 0; i < 20; ++i) sequences[s].push_back(int32_t(random_u64(s, i) % 50));
  const ExpertProfile p = record_experts(*engine, sequences, 50);
  EXPECT_EQ(p.tokens, 50);
  ASSERT_EQ(p.layers.size(), 2u);
  for (const auto& l : p.layers) EXPECT_EQ(l.ids.size(), 100u);
  const auto chances = expert_chances(p);
  double sum = 0;
  for (const float c : chances.at(1)) sum += double(c);
  EXPECT_NEAR(sum, 2, 1e-5) << "two of six for each token";

  const TempDir dir;
  const Path file = dir / "experts.json";
  ASSERT_TRUE(write_expert_profile(p, file, false).ok());
  EXPECT_FALSE(write_expert_profile(p, file, false).ok()) << "it exists";
  const auto back = read_expert_profile(file, engine->manifest());
  ASSERT_TRUE(back.ok()) << back.error().message();
  EXPECT_EQ(back->layers[1].ids, p.layers[1].ids);
  EXPECT_EQ(back->tokens, 50);

  const auto refused = [&](const std::string& from, const std::string& to, const std::string& says) {
    std::string text = read_file(file).value();
    text.replace(text.find(from), from.size(), to);
    const Path bad = dir / "bad.json";
    std::filesystem::remove(bad);
    ASSERT_TRUE(write_file(bad, text).ok());
    const auto r = read_expert_profile(bad, engine->manifest());
    ASSERT_FALSE(r.ok()) << to;
    EXPECT_THAT(r.error().message(), HasSubstr(says));
  };
  refused("expert profile 1", "expert profile 9", "no expert profile");
  refused("\"experts\":6", "\"experts\":8", "belongs to another model");
  refused("\"tokens\":50", "\"tokens\":51", "ids, expected 102");
  refused("\"tokens\":50", "\"tokens\":50,\"mood\":1", "unknown key 'mood'");
  refused("\"ids\":[", "\"ids\":[77,", "101 ids");
  ModelShape other;
  other.k = 3;
  EXPECT_FALSE(read_expert_profile(file, TestModel(other).manifest()).ok());
}

}  // namespace
}  // namespace mi::tools
