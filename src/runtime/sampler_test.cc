#include "runtime/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "base/util.h"

namespace mi::runtime {
namespace {

std::vector<float> random_row(uint64_t seed, size_t vocab, float scale = 6) {
  std::vector<float> row(vocab);
  for (size_t i = 0; i < vocab; ++i) row[i] = scale * random_unit(seed, i);
  return row;
}
SamplingParams greedy() {
  SamplingParams p;
  p.temperature = 0;
  return p;
}
int32_t choose(const SamplingParams& p, std::span<const float> row, uint64_t seed = 1,
               std::span<const uint32_t> mask = {}) {
  return Sampler(p, seed, {}, {}).choose(row, mask).scored.token;
}

TEST(Sampler, GreedyTakesTheLowestIdOfEqualLogits) {
  std::vector<float> row = {1, 3, 2, 3, 3};
  EXPECT_EQ(choose(greedy(), row), 1);
  SamplingParams p;
  p.temperature = 1e-6;
  EXPECT_EQ(choose(p, row), 1);
  p.temperature = 1.5;
  p.top_k = 1;
  EXPECT_EQ(choose(p, row), 1);
  p.top_k = 0;
  p.top_p = 1e-6;
  EXPECT_EQ(choose(p, row), 1);
  p.top_p = 0;
  EXPECT_EQ(choose(p, row), 1);
}

TEST(Sampler, FrequenciesFollowTheSoftmax) {
  std::vector<float> row = {0, 1, 2, -1};
  for (double t : {0.5, 1.0, 3.0}) {
    SamplingParams p;
    p.temperature = t;
    double total = 0;
    for (float x : row) total += std::exp(x / t);
    std::vector<int> count(4);
    const int n = 40000;
    for (int i = 0; i < n; ++i) ++count[size_t(choose(p, row, uint64_t(i)))];
    for (size_t i = 0; i < 4; ++i) {
      const double want = std::exp(row[i] / t) / total;
      EXPECT_NEAR(double(count[i]) / n, want, 5 * std::sqrt(want * (1 - want) / n)) << t << " " << i;
    }
  }
}

std::set<int32_t> support(const SamplingParams& p, std::span<const float> row) {
  std::set<int32_t> s;
  for (uint64_t seed = 0; seed < 3000; ++seed) s.insert(choose(p, row, seed));
  return s;
}

TEST(Sampler, TopKTopPMinPKeepTheRightHead) {
  // Probabilities 0.4, 0.3, 0.2, 0.1.
  std::vector<float> row = {std::log(0.1f), std::log(0.4f), std::log(0.2f), std::log(0.3f)};
  SamplingParams p;
  p.top_k = 2;
  EXPECT_EQ(support(p, row), (std::set<int32_t>{1, 3}));
  p.top_k = 1000;
  EXPECT_EQ(support(p, row).size(), 4u);
  p.top_k = 0;
  p.top_p = 0.65;
  EXPECT_EQ(support(p, row), (std::set<int32_t>{1, 3}));
  p.top_p = 0.75;
  EXPECT_EQ(support(p, row), (std::set<int32_t>{1, 2, 3}));
  p.top_p = 1;
  p.min_p = 0.45;
  EXPECT_EQ(support(p, row), (std::set<int32_t>{1, 2, 3}));
  p.min_p = 1;
  EXPECT_EQ(support(p, row), (std::set<int32_t>{1}));
  // top_p counts within what top_k left: of 0.4 and 0.3 the first is 57 %.
  p.min_p = 0;
  p.top_k = 2;
  p.top_p = 0.5;
  EXPECT_EQ(support(p, row), (std::set<int32_t>{1}));
}

TEST(Sampler, TopPDropsTheLightTailExactlyLikeAFullSort) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    std::vector<float> row = random_row(seed, 500, 12);
    std::vector<std::pair<double, int32_t>> sorted;
    double total = 0;
    for (size_t i = 0; i < row.size(); ++i) sorted.push_back({-std::exp(double(row[i])), int32_t(i)});
    for (auto& [w, i] : sorted) total -= w;
    std::sort(sorted.begin(), sorted.end());
    std::set<int32_t> nucleus;
    double sum = 0;
    for (auto& [w, i] : sorted) {
      nucleus.insert(i);
      sum -= w;
      if (sum >= 0.3 * total) break;
    }
    SamplingParams p;
    p.top_p = 0.3;
    for (uint64_t i = 0; i < 200; ++i) EXPECT_TRUE(nucleus.contains(choose(p, row, i)));
  }
}

// The header's words without any short cut: everything is weighed and sorted.
int32_t slow_twin(const SamplingParams& p, std::span<const float> row, uint64_t seed) {
  struct Entry {
    double weight;
    float logit;
    int32_t token;
  };
  const float most = *std::max_element(row.begin(), row.end());
  std::vector<Entry> c;
  for (size_t i = 0; i < row.size(); ++i) {
    const double w = std::exp((double(row[i]) - most) / p.temperature);
    if (!std::isinf(row[i]) && w >= p.min_p) c.push_back({w, row[i], int32_t(i)});
  }
  const auto likelier = [](const Entry& a, const Entry& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
  };
  const auto sum = [&c] {
    double total = 0;
    for (const Entry& e : c) total += e.weight;
    return total;
  };
  if (p.top_k > 0 && p.top_k < int64_t(row.size())) {
    std::sort(c.begin(), c.end(), likelier);
    c.resize(std::min(c.size(), size_t(p.top_k)));
  }
  if (p.top_p < 1) {
    const double enough = p.top_p * sum();
    std::sort(c.begin(), c.end(), likelier);
    double kept = 0;
    size_t n = 0;
    do kept += c[n++].weight;
    while (kept < enough && n < c.size());
    c.resize(n);
  }
  double target = sum() * double(random_u64(seed, 0) >> 11) * 0x1p-53;
  for (const Entry& e : c)
    if ((target -= e.weight) < 0) return e.token;
  return c.back().token;
}

TEST(Sampler, DrawsAreThoseOfTheSlowTwin) {
  for (const size_t vocab : {7u, 64u, 65u, 1000u, 5003u}) {
    for (const float scale : {0.5f, 12.0f, 60.0f}) {
      std::vector<float> row = random_row(vocab, vocab, scale);
      row[vocab / 2] = -std::numeric_limits<float>::infinity();
      row[vocab / 3] = row[vocab / 4];
      for (const int64_t top_k : {0, 2, 5, 50, 256, 257, 900}) {
        for (const double top_p : {1.0, 0.999, 0.9, 0.3, 1e-9}) {
          for (const double min_p : {0.0, 1e-3, 0.2}) {
            SamplingParams p;
            p.temperature = 0.7;
            p.top_k = top_k;
            p.top_p = top_p;
            p.min_p = min_p;
            for (uint64_t seed = 0; seed < 20; ++seed)
              ASSERT_EQ(choose(p, row, seed), slow_twin(p, row, seed))
                  << vocab << " " << scale << " top_k " << top_k << " top_p " << top_p << " min_p " << min_p << " "
                  << seed;
          }
        }
      }
    }
  }
}

TEST(Sampler, SeededDrawsDependOnSeedAndPositionOnly) {
  std::vector<float> row = random_row(5, 200);
  SamplingParams p;
  p.seed = 0xffffffffffffffffu;
  Sampler a(p, 1, {}, {}), b(p, 2, {}, {});
  std::set<int32_t> seen;
  for (int i = 0; i < 20; ++i) {
    int32_t t = a.choose(row, {}).scored.token;
    EXPECT_EQ(t, b.choose(row, {}).scored.token);
    EXPECT_EQ(t, b.choose(row, {}).scored.token);  // choosing changes nothing
    a.accept(t);
    b.accept(t);
    seen.insert(t);
  }
  EXPECT_GT(seen.size(), 3u);
  p.seed.reset();
  EXPECT_NE(Sampler(p, 1, {}, {}).choose(random_row(6, 5000, 0.1f), {}).scored.token,
            Sampler(p, 2, {}, {}).choose(random_row(6, 5000, 0.1f), {}).scored.token);
}

TEST(Sampler, RepetitionCountsPromptAndOutputTheOthersOutputOnly) {
  std::vector<int32_t> prompt = {2, 2};
  SamplingParams p = greedy();
  p.presence_penalty = 2;
  p.frequency_penalty = 2;
  std::vector<float> row = {0, 1, 1.5f, -1};
  Sampler other(p, 1, prompt, {});
  EXPECT_EQ(other.choose(row, {}).scored.token, 2);  // the prompt's token is not punished
  other.accept(2);
  EXPECT_EQ(other.choose(row, {}).scored.token, 1);

  p = greedy();
  p.repetition_penalty = 2;
  Sampler repetition(p, 1, prompt, {});
  EXPECT_EQ(repetition.choose(row, {}).scored.token, 1);
  repetition.accept(1);
  EXPECT_EQ(repetition.choose(row, {}).scored.token, 2);  // 0.75 against 0.5
  std::vector<float> negative = {-2, -1, -1.5f, -1.9f};   // 1 becomes -2, 2 becomes -3
  EXPECT_EQ(repetition.choose(negative, {}).scored.token, 3);

  p.presence_penalty = 2;
  EXPECT_EQ(choose(p, std::vector<float>{0, 0.5f, 1.5f, 0}, 1), 2);
  EXPECT_EQ(Sampler(p, 1, prompt, {}).choose(std::vector<float>{0, 0.5f, 1.5f, 0}, {}).scored.token,
            2);  // 0.75, not -1.25
}

TEST(Sampler, FrequencyPenaltyMakesTokensTakeTurns) {
  SamplingParams p = greedy();
  p.frequency_penalty = 2;
  p.logit_bias = {{3, 100}, {5, 100}};
  Sampler s(p, 1, {}, {});
  std::vector<float> row(10, 0.0f);
  row[3] = 1;
  std::map<int32_t, int> count;
  for (int i = 0; i < 60; ++i) {
    int32_t t = s.choose(row, {}).scored.token;
    s.accept(t);
    ++count[t];
  }
  EXPECT_EQ(count.size(), 2u);
  EXPECT_NEAR(count[3], 30, 1);
}

TEST(Sampler, MaskAndMinTokens) {
  std::vector<float> row = random_row(3, 40);
  std::vector<uint32_t> mask(2, 0);
  mask[1] = 1u << 3;  // token 35 only
  EXPECT_EQ(choose(greedy(), row, 1, mask), 35);
  SamplingParams p;
  for (uint64_t seed = 0; seed < 50; ++seed) EXPECT_EQ(choose(p, row, seed, mask), 35);
  mask[1] = 0;
  EXPECT_EQ(Sampler(p, 1, {}, {}).choose(row, mask).outcome, Sampler::Outcome::kNothingAllowed);

  p = greedy();
  p.min_tokens = 1;
  row[7] = 100;
  Sampler s(p, 1, {}, {7});
  EXPECT_NE(s.choose(row, {}).scored.token, 7);
  mask[0] = 1u << 7;
  EXPECT_EQ(s.choose(row, mask).scored.token, 7);  // the grammar allows nothing but the end
  s.accept(1);
  EXPECT_EQ(s.choose(row, {}).scored.token, 7);
}

TEST(Sampler, LogprobsAreThoseOfTheRawRowAndFinite) {
  const float inf = std::numeric_limits<float>::infinity();
  std::vector<float> row = {1, 2, 2, -inf, 0.5f};
  SamplingParams p = greedy();
  p.logprobs = 5;
  p.logit_bias = {{4, 50}};
  auto c = Sampler(p, 1, {}, {}).choose(row, {});
  EXPECT_EQ(c.scored.token, 4);
  const double lse = std::log(std::exp(1) + 2 * std::exp(2) + std::exp(0.5));
  EXPECT_NEAR(c.scored.logprob, 0.5 - lse, 1e-6);
  ASSERT_EQ(c.scored.top.size(), 5u);
  std::vector<int32_t> order;
  double sum = 0;
  for (auto& t : c.scored.top) {
    order.push_back(t.token);
    EXPECT_TRUE(std::isfinite(t.logprob));
    sum += std::exp(t.logprob);
  }
  EXPECT_EQ(order, (std::vector<int32_t>{1, 2, 0, 4, 3}));
  EXPECT_NEAR(sum, 1, 1e-6);
  EXPECT_EQ(c.scored.top[4].logprob, kLowestLogprob);
  EXPECT_EQ(score_token(row, 0, 20).top.size(), 5u);
  EXPECT_EQ(score_token(row, 0, 2).top.size(), 2u);
  EXPECT_EQ(score_token(row, 0, 0).top.size(), 0u);
}

TEST(Sampler, ScoresAreAccurate) {
  std::vector<float> row = random_row(9, 3000, 40);
  long double sum = 0;
  for (float x : row) sum += std::exp((long double)(x));
  for (int32_t t = 0; t < 3000; t += 7)
    EXPECT_NEAR(score_token(row, t, 0).logprob, double(row[size_t(t)] - std::log(sum)), 4e-6);
}

TEST(Sampler, RowsThatAreNoNumbersAreReported) {
  for (float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    std::vector<float> row = random_row(1, 20);
    row[11] = bad;
    EXPECT_EQ(Sampler(greedy(), 1, {}, {}).choose(row, {}).outcome, Sampler::Outcome::kBadLogits);
  }
}

TEST(Sampler, ExtremesStayDefined) {
  std::vector<float> row = random_row(4, 100);
  const int32_t best = choose(greedy(), row);
  SamplingParams p;
  for (double t : {1e-30, 1e-5, 1.0001e-5, 100.0, 1e300}) {
    p.temperature = t;
    int32_t got = choose(p, row);
    EXPECT_TRUE(got >= 0 && got < 100);
    if (t < 2e-5) {
      EXPECT_EQ(got, best);
    }
  }
  p = greedy();
  for (double r : {1e-300, 1e-9, 1e300}) {
    p.repetition_penalty = r;
    std::vector<int32_t> prompt = {1, 2, 3};
    auto c = Sampler(p, 1, prompt, {}).choose(row, {});
    EXPECT_EQ(c.outcome, Sampler::Outcome::kToken);
  }
}

// A batch of very different settings: each must choose as it does alone, in any order.
TEST(Sampler, SettingsDoNotLeakBetweenRows) {
  const size_t vocab = 120;
  std::vector<SamplingParams> all(8, greedy());
  all[0].repetition_penalty = 2;
  all[1].temperature = 1, all[1].seed = 7, all[1].top_k = 1;
  all[2].temperature = 1e-6;
  all[3].temperature = 1, all[3].seed = 8, all[3].top_p = 0;
  all[4].temperature = 1, all[4].seed = 9, all[4].top_k = 100000;
  all[5].temperature = 1, all[5].seed = 10, all[5].min_p = 1;
  for (int32_t t = 0; t < int32_t(vocab); ++t) {
    if (t != 77) all[6].logit_bias.push_back({t, -100});
  }
  all[7].presence_penalty = 2, all[7].logprobs = 20;
  std::vector<int32_t> prompt = {5, 6};

  auto play = [&](const std::vector<size_t>& order) {
    std::vector<Sampler> samplers;
    for (const SamplingParams& p : all) samplers.emplace_back(p, 1, prompt, std::vector<int32_t>{});
    std::vector<std::vector<int32_t>> out(all.size());
    for (uint64_t step = 0; step < 25; ++step) {
      for (size_t i : order) {
        int32_t t = samplers[i].choose(random_row(1000 * i + step, vocab), {}).scored.token;
        samplers[i].accept(t);
        out[i].push_back(t);
      }
    }
    return out;
  };
  std::vector<size_t> order = {0, 1, 2, 3, 4, 5, 6, 7};
  const auto want = play(order);
  EXPECT_EQ(want[6], std::vector<int32_t>(25, 77));
  for (uint64_t shuffle = 0; shuffle < 20; ++shuffle) {
    for (size_t i = 7; i > 0; --i) std::swap(order[i], order[random_u64(shuffle, i) % (i + 1)]);
    EXPECT_EQ(play(order), want);
  }
  for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(play({i})[i], want[i]);
}

}  // namespace
}  // namespace mi::runtime
