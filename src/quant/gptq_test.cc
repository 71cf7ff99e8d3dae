// Error-compensating rounding against rounding to nearest, and the Gram matrix that it needs.
#include "quant/gptq.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "base/util.h"
#include "quant/axpy.h"
#include "quant/capture.h"
#include "quant/int4.h"
#include "quant/int8.h"

namespace mi::quant {
namespace {

constexpr int kLow8 = -127, kHigh8 = 127, kLow4 = -8, kHigh4 = 7;

// `tokens` correlated rows of k: a few directions carry most of it, as in a model.
std::vector<float> correlated_rows(int64_t tokens, int64_t k, uint64_t seed) {
  const int64_t directions = std::max<int64_t>(2, k / 8);
  std::vector<float> x(size_t(tokens * k));
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t j = 0; j < k; ++j) {
      float v = 0.3f * random_normal(seed, uint64_t(t * k + j));
      for (int64_t d = 0; d < directions; ++d)
        v += random_normal(seed + 1, uint64_t(t * directions + d)) * random_normal(seed + 2, uint64_t(d * k + j));
      x[size_t(t * k + j)] = v;
    }
  return x;
}

std::vector<double> gram_of(const std::vector<float>& x, int64_t k) {
  std::vector<double> h(size_t(k * k));
  for (size_t t = 0; t < x.size() / size_t(k); ++t)
    for (int64_t i = 0; i < k; ++i)
      for (int64_t j = 0; j < k; ++j) h[size_t(i * k + j)] += double(x[t * size_t(k) + size_t(i)]) * x[t * size_t(k) + size_t(j)];
  return h;
}

std::vector<float> random_matrix(int64_t n, int64_t k, uint64_t seed) {
  std::vector<float> w(size_t(n * k));
  for (size_t i = 0; i < w.size(); ++i) w[i] = random_normal(seed, i);
  return w;
}

struct Rounded {
  std::vector<int8_t> q;
  std::vector<float> scale;
};
Rounded nearest(const std::vector<float>& w, int64_t n, int64_t k, int64_t group) {
  Rounded r{std::vector<int8_t>(w.size()), std::vector<float>(size_t(n * ((k + group - 1) / group)))};
  if (group < k)
    quantize_rows_int4(w.data(), n, k, group, r.q.data(), r.scale.data());
  else
    quantize_rows(w.data(), n, k, WeightScheme::kPerChannel, r.q.data(), r.scale.data());
  return r;
}

std::vector<float> narrowed(const std::vector<double>& v) { return {v.begin(), v.end()}; }

// tr((W - Q) H (W - Q)^T)
double output_error(const std::vector<float>& w, const Rounded& r, const std::vector<double>& h, int64_t n, int64_t k, int64_t group) {
  const int64_t groups = (k + group - 1) / group;
  double error = 0;
  std::vector<double> d(static_cast<size_t>(k));
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t i = 0; i < k; ++i)
      d[size_t(i)] = double(w[size_t(row * k + i)]) - double(r.q[size_t(row * k + i)]) * r.scale[size_t(row * groups + i / group)];
    for (int64_t i = 0; i < k; ++i)
      for (int64_t j = 0; j < k; ++j) error += d[size_t(i)] * h[size_t(i * k + j)] * d[size_t(j)];
  }
  return error;
}

TEST(GptqTest, LosesLessThanRoundingToNearest) {
  for (const auto& [n, k, group] : {std::tuple<int64_t, int64_t, int64_t>{20, 96, 96}, {20, 96, 32}, {33, 130, 64}, {5, 50, 50}}) {
    const std::vector<float> w = random_matrix(n, k, 7), x = correlated_rows(4 * k, k, 11);
    const std::vector<double> h = gram_of(x, k);
    const Rounded plain = nearest(w, n, k, group);
    Rounded spread = plain;
    const bool int8 = group == k;
    ErrorSpread(narrowed(h), k, 0.01).round_rows(w.data(), n, plain.scale.data(), group, int8 ? kLow8 : kLow4, int8 ? kHigh8 : kHigh4, spread.q.data());
    for (int8_t v : spread.q) ASSERT_TRUE(v >= (int8 ? kLow8 : kLow4) && v <= (int8 ? kHigh8 : kHigh4));
    const double before = output_error(w, plain, h, n, k, group), after = output_error(w, spread, h, n, k, group);
    EXPECT_LT(after, 0.5 * before) << n << " x " << k << " in groups of " << group;
    EXPECT_GT(after, 0);
  }
}

// Without correlation there is nothing that another column could take back.
TEST(GptqTest, UncorrelatedInputsGiveNearest) {
  const int64_t n = 19, k = 70;
  const std::vector<float> w = random_matrix(n, k, 3);
  for (const bool equal : {true, false}) {
    std::vector<float> h(size_t(k * k));
    for (int64_t i = 0; i < k; ++i) h[size_t(i * k + i)] = equal ? 1.0f : float(1 + i % 7);
    for (const int64_t group : {k, int64_t(32)}) {
      const bool int8 = group == k;
      const Rounded plain = nearest(w, n, k, group);
      std::vector<int8_t> q(w.size());
      ErrorSpread(h, k, 0.01).round_rows(w.data(), n, plain.scale.data(), group, int8 ? kLow8 : kLow4, int8 ? kHigh8 : kHigh4, q.data());
      for (size_t i = 0; i < q.size(); ++i) {
        const int64_t row = int64_t(i) / k, groups = (k + group - 1) / group;
        const float s = plain.scale[size_t(row * groups + int64_t(i) % k / group)];
        ASSERT_EQ(q[i], int8_t(std::clamp(std::nearbyint(w[i] / s), float(int8 ? kLow8 : kLow4), float(int8 ? kHigh8 : kHigh4)))) << i;
      }
    }
  }
}

TEST(GptqTest, WhatCalibrationNeverReachedIsRoundedToNearest) {
  const int64_t n = 4, k = 40;
  const std::vector<float> w = random_matrix(n, k, 5);
  const Rounded plain = nearest(w, n, k, k);
  std::vector<int8_t> q(w.size());
  ErrorSpread(std::vector<float>(size_t(k * k)), k, 0.01).round_rows(w.data(), n, plain.scale.data(), k, kLow8, kHigh8, q.data());
  EXPECT_EQ(q, plain.q);
}

// A channel that is dead on the calibration text (its row and column of H are zero) neither gives nor takes.
TEST(GptqTest, DeadChannelsStayNearest) {
  const int64_t n = 6, k = 48, dead = 17;
  const std::vector<float> w = random_matrix(n, k, 9);
  std::vector<float> x = correlated_rows(3 * k, k, 13);
  for (size_t t = 0; t < x.size() / size_t(k); ++t) x[t * size_t(k) + size_t(dead)] = 0;
  const Rounded plain = nearest(w, n, k, k);
  std::vector<int8_t> q(w.size());
  ErrorSpread(narrowed(gram_of(x, k)), k, 0.01).round_rows(w.data(), n, plain.scale.data(), k, kLow8, kHigh8, q.data());
  for (int64_t r = 0; r < n; ++r) EXPECT_EQ(q[size_t(r * k + dead)], plain.q[size_t(r * k + dead)]);
}

TEST(GptqTest, FewerRowsThanColumnsStayFinite) {
  const int64_t n = 8, k = 64;
  const std::vector<float> w = random_matrix(n, k, 21), x = correlated_rows(3, k, 23);  // rank 3
  const std::vector<double> h = gram_of(x, k);
  const Rounded plain = nearest(w, n, k, 32);
  Rounded spread = plain;
  ErrorSpread(narrowed(h), k, 0.01 * double(k) / 3).round_rows(w.data(), n, plain.scale.data(), 32, kLow4, kHigh4, spread.q.data());
  EXPECT_LT(output_error(w, spread, h, n, k, 32), output_error(w, plain, h, n, k, 32));
}

// Magnitudes of real models' outlier channels, and of nearly silent layers.
TEST(GptqTest, AnyScaleOfInputs) {
  const int64_t n = 8, k = 64;
  const std::vector<float> w = random_matrix(n, k, 31), x = correlated_rows(4 * k, k, 33);
  std::vector<int8_t> first;
  for (const double size : {1.0, 1e-12, 1e12}) {
    std::vector<double> h = gram_of(x, k);
    for (double& v : h) v *= size;
    const Rounded plain = nearest(w, n, k, k);
    std::vector<int8_t> q(w.size());
    ErrorSpread(narrowed(h), k, 0.01).round_rows(w.data(), n, plain.scale.data(), k, kLow8, kHigh8, q.data());
    EXPECT_NE(q, plain.q);
    if (first.empty()) first = q;
    // Powers of ten round the Gram matrix differently: nearly all agree, not all.
    int64_t differ = 0;
    for (size_t i = 0; i < q.size(); ++i) differ += std::abs(q[i] - first[i]) > 1;
    EXPECT_EQ(differ, 0) << size;
  }
}

// Rows are taken sixteen at a time; where a row stands must not matter.
TEST(GptqTest, ARowDoesNotKnowItsNeighbours) {
  const int64_t n = 37, k = 50;
  const std::vector<float> w = random_matrix(n, k, 41);
  const ErrorSpread spread(narrowed(gram_of(correlated_rows(200, k, 43), k)), k, 0.01);
  const Rounded plain = nearest(w, n, k, k);
  std::vector<int8_t> all(w.size()), one(static_cast<size_t>(k));
  spread.round_rows(w.data(), n, plain.scale.data(), k, kLow8, kHigh8, all.data());
  for (int64_t r = 0; r < n; ++r) {
    spread.round_rows(w.data() + r * k, 1, plain.scale.data() + r, k, kLow8, kHigh8, one.data());
    EXPECT_TRUE(std::equal(one.begin(), one.end(), all.begin() + r * k)) << r;
  }
}

// What could still be won by moving one number by one: next to nothing, which spreading alone does not reach.
TEST(GptqTest, NoSingleChangeHelpsMuch) {
  const int64_t n = 24, k = 96, group = 32;
  const std::vector<float> w = random_matrix(n, k, 45);
  const std::vector<double> h = gram_of(correlated_rows(4 * k, k, 47), k);
  Rounded r = nearest(w, n, k, group);
  const auto to_win = [&] {
    double all = 0;
    for (int64_t row = 0; row < n; ++row)
      for (int64_t i = 0; i < k; ++i) {
        const float s = r.scale[size_t(row * 3 + i / group)];
        double g = 0;
        for (int64_t j = 0; j < k; ++j)
          g += h[size_t(i * k + j)] * (double(w[size_t(row * k + j)]) - double(r.q[size_t(row * k + j)]) * r.scale[size_t(row * 3 + j / group)]);
        const double one = double(s) * s * h[size_t(i * k + i)], change = 2 * std::fabs(g * s) - one;
        const int to = r.q[size_t(row * k + i)] + (g * s > 0 ? 1 : -1);
        if (change > 0 && to >= kLow4 && to <= kHigh4) all += change;
      }
    return all / output_error(w, r, h, n, k, group);
  };
  EXPECT_GT(to_win(), 1);
  ErrorSpread(narrowed(h), k, 1e-6).round_rows(w.data(), n, r.scale.data(), group, kLow4, kHigh4, r.q.data());
  EXPECT_LT(to_win(), 0.02);
}

TEST(GptqTest, FittedScalesLoseLess) {
  const int64_t n = 37, k = 100, group = 32;
  const std::vector<float> w = random_matrix(n, k, 55);
  const std::vector<double> h = gram_of(correlated_rows(4 * k, k, 57), k);
  const ErrorSpread spread(narrowed(h), k, 0.01);
  Rounded fixed = nearest(w, n, k, group), fitted = fixed;
  spread.round_rows(w.data(), n, fixed.scale.data(), group, kLow4, kHigh4, fixed.q.data());
  spread.round_groups(w.data(), n, fitted.scale.data(), group, kLow4, kHigh4, fitted.q.data());
  EXPECT_LT(output_error(w, fitted, h, n, k, group), 0.97 * output_error(w, fixed, h, n, k, group));
  for (float s : fitted.scale) EXPECT_EQ(s, to_f32(to_bf16(s)));  // what engines store
  // A row does not know its neighbours here either.
  std::vector<float> scale(4);
  std::vector<int8_t> one(static_cast<size_t>(k));
  for (int64_t r : {0, 20, 36}) {
    const Rounded first = nearest({w.begin() + r * k, w.begin() + (r + 1) * k}, 1, k, group);
    scale = first.scale;
    spread.round_groups(w.data() + r * k, 1, scale.data(), group, kLow4, kHigh4, one.data());
    EXPECT_TRUE(std::equal(one.begin(), one.end(), fitted.q.begin() + r * k)) << r;
    EXPECT_TRUE(std::equal(scale.begin(), scale.end(), fitted.scale.begin() + r * 4)) << r;
  }
}

TEST(GptqTest, ScalesOfGroupsMindWhatCounts) {
  const int64_t n = 50, k = 64, group = 32;
  const std::vector<float> w = random_matrix(n, k, 65);
  std::vector<float> importance(static_cast<size_t>(k));
  for (size_t i = 0; i < importance.size(); ++i) importance[i] = i % 8 == 0 ? 100.0f : 0.01f;
  const auto error = [&](const Rounded& r) {
    double sum = 0;
    for (int64_t i = 0; i < n * k; ++i)
      sum += double(importance[size_t(i % k)]) * std::pow(double(w[size_t(i)]) - double(r.q[size_t(i)]) * r.scale[size_t(i / group)], 2);
    return sum;
  };
  const Rounded plain = nearest(w, n, k, group);
  Rounded minded = plain;
  quantize_rows_int4(w.data(), n, k, group, minded.q.data(), minded.scale.data(), importance.data());
  EXPECT_LT(error(minded), 0.9 * error(plain));
}

TEST(GptqTest, GroupsOfZerosStayZero) {
  const int64_t k = 64;
  std::vector<float> w = random_matrix(1, k, 51);
  std::fill(w.begin(), w.begin() + 32, 0.0f);
  const Rounded plain = nearest(w, 1, k, 32);
  std::vector<int8_t> q(w.size(), 9);
  ErrorSpread(narrowed(gram_of(correlated_rows(300, k, 53), k)), k, 0.01).round_rows(w.data(), 1, plain.scale.data(), 32, kLow4, kHigh4, q.data());
  for (size_t i = 0; i < 32; ++i) EXPECT_EQ(q[i], 0);
}

TEST(AxpyTest, EveryLengthAgainstASum) {
  for (int64_t n : {0, 1, 7, 8, 9, 31, 64, 100}) {
    std::vector<float> to(size_t(n) + 1, 0.5f), x(size_t(n) + 1);
    std::vector<double> to2(size_t(n) + 1, 0.5), x2(size_t(n) + 1);
    for (size_t i = 0; i < x.size(); ++i) x2[i] = x[i] = random_normal(61, i);
    subtract_scaled(to.data(), x.data(), 0.3f, n);
    subtract_scaled(to2.data(), x2.data(), 0.3, n);
    for (int64_t i = 0; i < n; ++i) {
      const float product = 0.3f * x[size_t(i)];
      const double product2 = 0.3 * x2[size_t(i)];
      EXPECT_EQ(to[size_t(i)], 0.5f - product);
      EXPECT_EQ(to2[size_t(i)], 0.5 - product2);
    }
    EXPECT_EQ(to[size_t(n)], 0.5f);  // nothing is written behind the end
    EXPECT_EQ(to2[size_t(n)], 0.5);
  }
}

TEST(GramTest, AgainstDoublesAndTheSameForAnyThreads) {
  for (const int64_t k : {1, 15, 16, 33, 100}) {
    Fed f;
    f.cols = k;
    const int64_t tokens = 150;
    f.rows = correlated_rows(tokens, k, 71);
    std::vector<int64_t> rows;
    for (int64_t t = 0; t < tokens; t += 1 + t % 3) rows.push_back(t);
    std::vector<float> divisor(static_cast<size_t>(k));
    for (size_t i = 0; i < divisor.size(); ++i) divisor[i] = 0.25f + random_unit(73, i);
    for (const bool divided : {false, true}) {
      const std::span<const float> d = divided ? std::span<const float>(divisor) : std::span<const float>();
      const std::vector<float> h = gram_matrix(f, rows, d, nullptr);
      ASSERT_EQ(int64_t(h.size()), k * k);
      for (const int threads : {1, 2, 3}) {
        hw::ThreadPool pool(threads);
        EXPECT_EQ(gram_matrix(f, rows, d, &pool), h) << k << " with " << threads << " threads";
      }
      for (int64_t i = 0; i < k; ++i)
        for (int64_t j = 0; j < k; ++j) {
          double sum = 0, size = 0;
          for (int64_t r : rows) {
            double p = double(f.rows[size_t(r * k + i)]) * f.rows[size_t(r * k + j)];
            if (divided) p /= double(divisor[size_t(i)]) * divisor[size_t(j)];
            sum += p;
            size += std::fabs(p);
          }
          ASSERT_NEAR(h[size_t(i * k + j)], sum, 1e-7 * double(rows.size()) * size + 1e-30) << i << ", " << j;
          ASSERT_EQ(h[size_t(i * k + j)], h[size_t(j * k + i)]);
        }
    }
  }
}

TEST(GramTest, NoRowsGiveZero) {
  Fed f;
  f.cols = 5;
  f.rows = correlated_rows(4, 5, 81);
  EXPECT_EQ(gram_matrix(f, {}, {}, nullptr), std::vector<float>(25));
}

}  // namespace
}  // namespace mi::quant
