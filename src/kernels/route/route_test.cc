#include "kernels/route/route.h"

#include <algorithm>
#include <numeric>

#include "kernels/testing.h"

namespace mi::kernels {
namespace {

struct Choice {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

std::vector<Choice> route(const RouteParams& p, const Matrix& logits, const float* bias, const hw::CpuFeatures& cpu = {}) {
  std::vector<float> out(size_t(logits.rows * 2 * p.k));
  route_rows(p, {logits.rows, logits.v.data(), logits.stride(), bias, out.data(), 8 * p.k}, 0, logits.rows, cpu);
  std::vector<Choice> all;
  for (int64_t t = 0; t < logits.rows; ++t) {
    Choice c;
    c.ids.resize(size_t(p.k));
    std::memcpy(c.ids.data(), out.data() + t * 2 * p.k, size_t(p.k) * 4);
    c.weights.assign(out.begin() + t * 2 * p.k + p.k, out.begin() + (t + 1) * 2 * p.k);
    all.push_back(c);
  }
  return all;
}

// The steps of tensor/op.h in double.
struct Exact {
  std::vector<int32_t> ids;
  std::vector<double> weights;
};
Exact exact_route(const RouteParams& p, const float* logits, const float* bias) {
  const size_t n = size_t(p.experts);
  std::vector<double> s(n), c(n);
  const double top = *std::max_element(logits, logits + n);
  double sum = 0;
  for (size_t e = 0; e < n; ++e) {
    s[e] = p.score == RouteScore::kSoftmax ? std::exp(logits[e] - top) : p.score == RouteScore::kSigmoid ? 1 / (1 + std::exp(-double(logits[e]))) : logits[e];
    sum += s[e];
  }
  for (size_t e = 0; e < n; ++e) {
    if (p.score == RouteScore::kSoftmax) s[e] /= sum;
    c[e] = s[e] + (bias ? bias[e] : 0);
  }
  const auto best = [](std::vector<double> v, size_t k) {
    std::vector<int32_t> order(v.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return v[size_t(a)] > v[size_t(b)]; });
    order.resize(k);
    return order;
  };
  if (p.groups > 1) {
    const size_t size = n / size_t(p.groups);
    std::vector<double> group;
    for (size_t g = 0; g < size_t(p.groups); ++g) {
      std::vector<double> v(c.begin() + long(g * size), c.begin() + long((g + 1) * size));
      std::sort(v.rbegin(), v.rend());
      group.push_back(p.group_by == GroupBy::kMax ? v[0] : v[0] + v[1]);
    }
    const auto kept = best(group, size_t(p.groups_keep));
    for (size_t e = 0; e < n; ++e)
      if (std::find(kept.begin(), kept.end(), int32_t(e / size)) == kept.end()) c[e] = p.group_fill_zero ? 0 : -INFINITY;
  }
  Exact r;
  r.ids = best(c, size_t(p.k));
  std::sort(r.ids.begin(), r.ids.end());
  for (int32_t e : r.ids) r.weights.push_back(s[size_t(e)]);
  double total = 0;
  if (p.softmax_after) {
    const double high = *std::max_element(r.weights.begin(), r.weights.end());
    for (double& w : r.weights) total += w = std::exp(w - high);
    for (double& w : r.weights) w /= total;
  }
  total = 0;
  for (double w : r.weights) total += w;
  for (double& w : r.weights) {
    if (p.renorm) w /= std::max(total + double(p.renorm_eps), double(p.renorm_min));
    w *= double(p.scale);
  }
  return r;
}

TEST(Route, ChoosesAndWeighsAsTheFormulaSays) {
  std::vector<RouteParams> cases;
  RouteParams p;
  p.experts = 60;
  p.k = 4;
  cases.push_back(p);                                  // qwen2_moe
  p.renorm = true;
  cases.push_back(p);                                  // mixtral
  p.score = RouteScore::kSigmoid;
  p.scale = 2.5f;
  p.renorm_eps = 1e-20f;
  cases.push_back(p);                                  // glm4_moe
  p.groups = 6;
  p.groups_keep = 2;
  cases.push_back(p);                                  // deepseek_v3
  p.group_by = GroupBy::kMax;
  p.group_fill_zero = true;
  cases.push_back(p);
  p = {};
  p.experts = 33;
  p.k = 5;
  p.score = RouteScore::kNone;
  p.softmax_after = true;
  cases.push_back(p);                                  // gpt_oss
  p.renorm = true;
  p.renorm_min = 1e-6f;
  p.score = RouteScore::kSoftmax;
  cases.push_back(p);
  for (const RouteParams& c : cases)
    for (bool biased : {false, true}) {
      const Matrix logits(50, c.experts, 21, 2.0f);
      const Matrix bias(1, c.experts, 22, 0.05f);
      const auto scalar = route(c, logits, biased ? bias.v.data() : nullptr);
      for (const auto& cpu : float_builds()) {
        const auto r = route(c, logits, biased ? bias.v.data() : nullptr, cpu);
        for (size_t t = 0; t < r.size(); ++t) {
          ASSERT_EQ(r[t].ids, scalar[t].ids);
          ASSERT_EQ(std::memcmp(r[t].weights.data(), scalar[t].weights.data(), size_t(c.k) * 4), 0) << hw::describe(cpu);
        }
      }
      for (int64_t t = 0; t < 50; ++t) {
        const Exact e = exact_route(c, logits.row(t), biased ? bias.v.data() : nullptr);
        ASSERT_EQ(scalar[size_t(t)].ids, e.ids) << "row " << t;
        // exp: below 2e-7, sums of at most 64 terms in lanes, a few single roundings.
        for (int64_t i = 0; i < c.k; ++i)
          ASSERT_NEAR(scalar[size_t(t)].weights[size_t(i)], e.weights[size_t(i)], std::abs(e.weights[size_t(i)]) * (4e-7 + 24 * kUlp) + (c.softmax_after ? 1e-6 : 0));
      }
    }
}

TEST(Route, TiesGoToTheLowerId) {
  RouteParams p;
  p.experts = 8;
  p.k = 3;
  p.score = RouteScore::kNone;
  Matrix logits(1, 8);
  for (int64_t e = 0; e < 8; ++e) logits.at(0, e) = e == 6 ? 2.0f : 1.0f;
  EXPECT_EQ(route(p, logits, nullptr)[0].ids, (std::vector<int32_t>{0, 1, 6}));
}

TEST(Route, NaNNeverWinsAndIdsStayDistinct) {
  RouteParams p;
  p.experts = 6;
  p.k = 4;
  p.groups = 3;
  p.groups_keep = 2;
  for (RouteScore s : {RouteScore::kSoftmax, RouteScore::kSigmoid, RouteScore::kNone}) {
    p.score = s;
    Matrix logits(2, 6, 5, 1.0f);
    for (int64_t e = 0; e < 6; ++e) logits.at(0, e) = std::nanf("");
    logits.at(1, 2) = std::nanf("");
    for (const Choice& c : route(p, logits, nullptr)) {
      for (size_t i = 0; i < 4; ++i) ASSERT_TRUE(c.ids[i] >= 0 && c.ids[i] < 6 && (i == 0 || c.ids[i] > c.ids[i - 1]));
    }
  }
}

}  // namespace
}  // namespace mi::kernels
