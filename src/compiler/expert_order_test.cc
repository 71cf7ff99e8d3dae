#include "compiler/expert_order.h"

#include <gtest/gtest.h>

#include "base/util.h"

namespace mi::compiler {
namespace {

using artifact::ExpertProfile;

constexpr int64_t kExperts = 16;

// One layer with a matrix of so many bytes for each of 16 experts.
artifact::Manifest manifest(int64_t stride) {
  artifact::Manifest m;
  artifact::WeightTensor w;
  w.packing = artifact::Packing::kPackedI8;
  w.experts = kExperts;
  w.expert_stride = stride;
  w.bytes = kExperts * stride;
  artifact::Instr route, linear;
  route.op = Op::kRoute;
  linear.op = Op::kExpertLinear;
  route.layer = linear.layer = 3;
  linear.weights = {{Role::kWeight, 0}};
  m.program = {route, linear};
  m.weights = {w};
  return m;
}

// Two experts for each token: of a hundred, `paired` choose one of four fixed pairs, the others any two. Behind token `until`
// all choose any two.
ExpertProfile traffic(uint64_t paired, int64_t tokens = 2000, int64_t until = 1 << 30) {
  constexpr int32_t kPairs[4][2] = {{2, 13}, {0, 7}, {5, 11}, {1, 9}};
  ExpertProfile p{"test", "test", tokens, {{3, kExperts, 2, {}}}};
  for (int64_t t = 0; t < tokens; ++t) {
    int32_t a = int32_t(random_u64(2, uint64_t(t)) % 16), b = int32_t((uint64_t(a) + 1 + random_u64(3, uint64_t(t)) % 15) % 16);
    if (t < until && random_u64(1, uint64_t(t)) % 100 < paired) {
      a = kPairs[random_u64(4, uint64_t(t)) % 4][0];
      b = kPairs[random_u64(4, uint64_t(t)) % 4][1];
    }
    p.layers[0].ids.insert(p.layers[0].ids.end(), {std::min(a, b), std::max(a, b)});
  }
  return p;
}

LayerOrder learnt(const ExpertProfile& p, int64_t stride) { return learn_order(p, manifest(stride)).at(0); }

TEST(ExpertOrder, PaysWhereExpertsThatAreChosenTogetherShareAPageOrARead) {
  const ExpertProfile always = traffic(100);
  const LayerOrder page = learnt(always, 1024);
  EXPECT_NEAR(page.as_is.reads, 2, 1e-9);
  EXPECT_NEAR(page.as_is.pages, 2, 1e-9);
  EXPECT_NEAR(page.learnt.reads, 1, 1e-9);
  EXPECT_LT(page.learnt.pages, 1.6) << "a pair may stand across a border of pages";
  EXPECT_TRUE(page.pays());
  const LayerOrder read = learnt(always, 8192);
  EXPECT_NEAR(read.as_is.pages, 4, 1e-9);
  EXPECT_NEAR(read.learnt.pages, 4, 1e-9) << "pages of their own";
  EXPECT_NEAR(read.learnt.reads, 1, 1e-9);
  EXPECT_TRUE(read.pays());
  std::vector<int32_t> sorted = read.slots;
  std::sort(sorted.begin(), sorted.end());
  for (int32_t e = 0; e < kExperts; ++e) EXPECT_EQ(sorted[size_t(e)], e) << "each place once";
}

TEST(ExpertOrder, StaysWhereNothingIsPromised) {
  const LayerOrder large = learnt(traffic(100), 1 << 20);
  EXPECT_NEAR(large.learnt.reads, 4, 1e-9);
  EXPECT_FALSE(large.pays());
  EXPECT_NE(large.why_not().find("up to 256 pages, and reading such neighbours together is no faster"), std::string::npos) << large.why_not();
  const LayerOrder even = learnt(traffic(0), 8192);
  EXPECT_FALSE(even.pays()) << even.gain << " +- " << even.error;
  EXPECT_LT(even.spread.skew, 1.3);
  const LayerOrder few = learnt(traffic(100, 200), 8192);
  EXPECT_FALSE(few.pays());
  EXPECT_NE(few.why_not().find("100 tokens to judge by are too few, 128 are the least"), std::string::npos) << few.why_not();
}

TEST(ExpertOrder, WhatTheSecondHalfDoesNotConfirmIsNotBelieved) {
  const LayerOrder forgotten = learnt(traffic(100, 2000, 1000), 8192);
  EXPECT_FALSE(forgotten.pays()) << forgotten.gain << " +- " << forgotten.error;
  LayerOrder lucky = forgotten;
  lucky.gain = 0.03;
  lucky.error = 0.015;
  EXPECT_FALSE(lucky.pays());
  EXPECT_NE(lucky.why_not().find("may be chance"), std::string::npos);
  lucky.error = 0.001;
  EXPECT_TRUE(lucky.pays());
}

TEST(ExpertOrder, LayersThatPayAndAreKnownMove) {
  artifact::Manifest m = manifest(8192);
  m.program.push_back(m.program[0]);
  m.program.push_back(m.program[1]);
  m.weights.push_back(m.weights[0]);
  m.program[2].layer = m.program[3].layer = 4;
  m.program[3].weights[0].tensor = 1;
  const ExpertOrder o = order_experts(traffic(90), &m);
  EXPECT_EQ(o.reordered(), 1);
  EXPECT_EQ(o.unknown, 1);
  EXPECT_EQ(m.weights[0].expert_slots, o.layers[0].slots);
  EXPECT_TRUE(m.weights[1].expert_slots.empty());
  const std::string text = expert_order_text(o);
  EXPECT_NE(text.find("layer 3 by how 2000 tokens"), std::string::npos) << text;
  EXPECT_NE(text.find("1 layer not in the profile stays"), std::string::npos) << text;
  EXPECT_NE(text.find("learnt from the first half, judged on the second"), std::string::npos) << text;

  artifact::Manifest same = manifest(8192);
  const ExpertOrder kept = order_experts(traffic(0), &same);
  EXPECT_TRUE(same.weights[0].expert_slots.empty());
  EXPECT_NE(expert_order_text(kept).find("expert order  kept"), std::string::npos);
  EXPECT_EQ(expert_order_json(kept)["reordered_layers"], 0);
}

// An engine whose experts are in the learnt order already has nothing to gain from it.
TEST(ExpertOrder, WhatIsStoredByItAlreadyGainsNothing) {
  const ExpertProfile p = traffic(100);
  artifact::Manifest m = manifest(8192);
  m.weights[0].expert_slots = learnt(p, 8192).slots;
  const LayerOrder again = learn_order(p, m).at(0);
  EXPECT_NEAR(again.as_is.reads, 1, 1e-9);
  EXPECT_NEAR(again.gain, 0, 1e-9);
}

TEST(ExpertOrder, SpreadIsLearntFromOneHalfAndJudgedOnTheOther) {
  const ExpertProfile hot = traffic(50), even = traffic(0);
  const ExpertSpread h = spread_of(hot.layers[0], hot.tokens), e = spread_of(even.layers[0], even.tokens);
  EXPECT_GT(h.skew, e.skew);
  EXPECT_NEAR(e.covered[1], 0.25, 0.04) << "four of sixteen";
  EXPECT_GT(h.covered[2], 0.7) << "the pairs have eight of them";
}

}  // namespace
}  // namespace mi::compiler
