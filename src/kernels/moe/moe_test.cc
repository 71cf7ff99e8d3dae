#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/gemm/gemm_case.h"
#include "kernels/moe/activation.h"
#include "kernels/moe/grouped.h"
#include "kernels/testing.h"

namespace mi::kernels {
namespace {

// With the machine itself: its products may be of a wider kernel than the float builds.
std::vector<hw::CpuFeatures> moe_builds() {
  auto all = float_builds();
  all.push_back(hw::detect_cpu());
  return all;
}

double exact_activation(const ActivationParams& p, double g, double u) {
  const auto sigmoid = [](double v) { return 1 / (1 + std::exp(-v)); };
  switch (p.kind) {
    case ActKind::kSilu:
      return g * sigmoid(g) * u;
    case ActKind::kGelu:
      return 0.5 * g * (1 + std::erf(g / std::sqrt(2.0))) * u;
    case ActKind::kGeluTanh:
      return 0.5 * g * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g))) * u;
    case ActKind::kRelu:
      return std::max(g, 0.0) * u;
    case ActKind::kSwigluOai:
      if (p.limit > 0) {
        g = std::min(g, double(p.limit));
        u = std::clamp(u, -double(p.limit), double(p.limit));
      }
      return (u + 1) * g * sigmoid(double(p.alpha) * g);
  }
  return 0;
}

const ActivationParams kActivations[] = {{ActKind::kSilu},
                                         {ActKind::kGelu},
                                         {ActKind::kGeluTanh},
                                         {ActKind::kRelu},
                                         {ActKind::kSwigluOai, 1.702f, 7.0f},
                                         {ActKind::kSwigluOai, 1.702f, 0.0f}};

TEST(Activation, NearTheExactFunctionAndEqualOnEveryBuild) {
  const int64_t cols = 2003;
  std::vector<float> g(static_cast<size_t>(cols)), u(g.size());
  for (size_t i = 0; i < g.size(); ++i) {
    g[i] = -20.0f + 0.02f * float(i);
    u[i] = 12.0f * std::sin(float(i));
  }
  for (const ActivationParams& p : kActivations) {
    std::vector<float> first;
    for (const auto& cpu : moe_builds()) {
      std::vector<float> h(g.size());
      activation_rows(p, g.data(), 0, u.data(), 0, 1, cols, h.data(), 0, cpu);
      if (first.empty()) first = h;
      EXPECT_TRUE(same_bits(h, first)) << int(p.kind) << " " << hw::describe(cpu);
    }
    for (size_t i = 0; i < g.size(); ++i)
      ASSERT_NEAR(first[i], exact_activation(p, g[i], u[i]),
                  4e-7 * (1 + std::abs(double(g[i]))) * (1 + std::abs(double(u[i]))))
          << int(p.kind) << " g " << g[i];
  }
}

TEST(Activation, LargeValuesStayFinite) {
  const float big = 3e4f;
  for (const ActivationParams& p : kActivations) {
    const float g[2] = {big, -big}, u[2] = {1, 1};
    float h[2];
    activation_rows(p, g, 0, u, 0, 1, 2, h, 0, {});
    EXPECT_TRUE(std::isfinite(h[0])) << int(p.kind);
    EXPECT_NEAR(h[1], 0.0f, 1e-20f) << int(p.kind);
  }
}

TEST(Activation, NanIsNotHidden) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), g[2] = {nan, 1}, u[2] = {1, nan};
  for (const ActivationParams& p : kActivations)
    for (const auto& cpu : moe_builds()) {
      float h[2];
      activation_rows(p, g, 0, u, 0, 1, 2, h, 0, cpu);
      EXPECT_TRUE(std::isnan(h[0]) && std::isnan(h[1])) << int(p.kind);
    }
}

// E packed matrices behind each other and what describes them.
struct Experts {
  std::vector<PackedMatrix> each;
  AlignedBytes packed, scale, scale_bf16, colsum, bias;
  std::vector<ExpertPlace> places;
  ExpertWeights w;

  Experts(GemmFormat f, int64_t experts, int64_t n, int64_t k, bool with_bias, std::mt19937& rng) {
    w.format = f;
    w.experts = experts;
    w.n = n;
    w.k = k;
    for (int64_t e = 0; e < experts; ++e) each.emplace_back(f, n, k, rng);
    const int64_t stride = each[0].bytes;
    packed = AlignedBytes(experts * stride);
    if (f == GemmFormat::kI4) {  // one group and one kind of scales for all
      w.group = each[0].group;
      for (PackedMatrix& m : each) m.int4(rng, 0, w.group, each[0].scale_bf16.size() > 0);
      scale_bf16 = AlignedBytes(experts * each[0].scale_bf16.size());
    }
    scale = AlignedBytes(experts * each[0].scale.size());
    colsum = AlignedBytes(experts * pad_n(n) * 4);
    w.bias_stride = n + 3;
    bias = AlignedBytes(experts * w.bias_stride * 4);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < experts * w.bias_stride; ++i) bias.as<float>()[i] = normal(rng);
    for (int64_t e = 0; e < experts; ++e) {
      const PackedMatrix& m = each[size_t(e)];
      std::memcpy(packed.as<char>(e * stride), m.packed.as<char>(), size_t(m.bytes));
      places.push_back({packed.as<char>(e * stride), nullptr, nullptr});
      if (!gemm_takes_q8(f)) continue;
      std::memcpy(scale.as<char>(e * m.scale.size()), m.scale.as<char>(), size_t(m.scale.size()));
      if (f == GemmFormat::kI4)
        std::memcpy(scale_bf16.as<char>(e * m.scale_bf16.size()), m.scale_bf16.as<char>(), size_t(m.scale_bf16.size()));
      else
        std::memcpy(colsum.as<char>(e * pad_n(n) * 4), m.colsum.as<char>(), size_t(pad_n(n) * 4));
      if (f != GemmFormat::kI4) continue;
      if (scale_bf16.size() > 0)
        places.back().scale_bf16 = reinterpret_cast<const uint16_t*>(scale_bf16.as<char>(e * m.scale_bf16.size()));
      else
        places.back().scale = reinterpret_cast<const float*>(scale.as<char>(e * m.scale.size()));
    }
    w.places = places.data();
    w.scale = f == GemmFormat::kI8 ? scale.as<float>() : nullptr;
    w.colsum = f == GemmFormat::kI8 ? colsum.as<int32_t>() : nullptr;
    w.bias = with_bias ? bias.as<float>() : nullptr;
  }
};

// Each expert's matrix, and its scales when int4, in memory of its own.
struct Scattered {
  std::vector<AlignedBytes> memory;
  std::vector<ExpertPlace> places;

  explicit Scattered(const Experts& x) {
    for (const PackedMatrix& m : x.each) {
      const auto copy = [&](const AlignedBytes& from, int64_t bytes) {
        memory.emplace_back(bytes);
        std::memcpy(memory.back().as<char>(), from.as<char>(), size_t(bytes));
        return memory.back().as<char>();
      };
      ExpertPlace p;
      p.w = copy(m.packed, m.bytes);
      if (x.places[0].scale) p.scale = reinterpret_cast<const float*>(copy(m.scale, m.scale.size()));
      if (x.places[0].scale_bf16) p.scale_bf16 = reinterpret_cast<const uint16_t*>(copy(m.scale_bf16, m.scale_bf16.size()));
      places.push_back(p);
    }
  }
  void give(ExpertWeights* w) const { w->places = places.data(); }
};

struct Route {
  int64_t stride;
  AlignedBytes data;
  RouteRows rows;

  // skew: every token's first choices are experts 0, 1, ...
  Route(int64_t tokens, int64_t experts, int64_t k, bool skew, std::mt19937& rng)
      : stride((k * 8 + 63) / 64 * 64), data(tokens * stride) {
    for (int64_t t = 0; t < tokens; ++t) {
      std::vector<int32_t> ids(static_cast<size_t>(experts));
      std::iota(ids.begin(), ids.end(), 0);
      if (!skew) std::shuffle(ids.begin(), ids.end(), rng);
      std::sort(ids.begin(), ids.begin() + k);
      for (int64_t j = 0; j < k; ++j) {
        data.as<int32_t>(t * stride)[j] = ids[size_t(j)];
        data.as<float>(t * stride)[k + j] = float(rng() % 1000) / 500 - 0.3f;
      }
    }
    rows = {data.as<char>(), stride, k};
  }
};

struct Shape {
  int64_t tokens, experts, k, hidden, inter;
  GemmFormat in, down;
  bool bias, skew, residual;
};

struct MoeCase {
  Shape s;
  std::mt19937 rng;
  Experts gate, up, down;
  Route route;
  InputRows x;
  AlignedBytes residual;

  explicit MoeCase(const Shape& shape)
      : s(shape),
        rng(7),
        gate(s.in, s.experts, s.inter, s.hidden, s.bias, rng),
        up(s.in, s.experts, s.inter, s.hidden, s.bias, rng),
        down(s.down, s.experts, s.hidden, s.inter, s.bias, rng),
        route(s.tokens, s.experts, s.k, s.skew, rng),
        x(s.in, s.tokens, s.hidden, rng),
        residual(s.tokens * s.hidden * 4) {
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < s.tokens * s.hidden; ++i) residual.as<float>()[i] = normal(rng);
  }

  // parts: products of these experts in a call each, with matrices that lie one by one.
  std::vector<float> grouped(const ActivationParams& act, int threads, const hw::CpuFeatures& cpu, StoredScale h_scale = {},
                             const std::vector<std::vector<int32_t>>& parts = {}) const {
    std::vector<float> out(size_t(s.tokens * s.hidden), -1.0f);
    AlignedBytes scratch(s.tokens * grouped_scratch_bytes_per_token(s.k, s.hidden, s.inter, s.down));
    hw::ThreadPool pool(threads);
    GroupedExpertsArgs a;
    a.tokens = s.tokens;
    a.route = route.rows;
    a.gate = gate.w;
    a.up = up.w;
    a.down = down.w;
    a.act = act;
    a.x = x.data.as<char>();
    a.x_stride = x.stride;
    a.x_scale_offset = x.scale_offset;
    if (s.residual) a.residual = residual.as<float>();
    a.residual_stride = s.hidden * 4;
    a.out = out.data();
    a.out_stride = s.hidden * 4;
    a.scratch = scratch.as<char>();
    a.h_scale = h_scale;
    if (parts.empty()) {
      grouped_experts(a, pool, cpu);
      return out;
    }
    const Scattered g(gate), u(up), d(down);
    g.give(&a.gate);
    u.give(&a.up);
    d.give(&a.down);
    for (const std::vector<int32_t>& experts : parts) grouped_products(a, experts, pool, cpu);
    grouped_sum(a, pool, cpu);
    return out;
  }

  // What down is fed: [pairs, inter].
  std::vector<float> hidden(const ActivationParams& act, const hw::CpuFeatures& cpu) const {
    hw::ThreadPool pool(2);
    const int64_t pairs = s.tokens * s.k;
    std::vector<float> g(size_t(pairs * s.inter)), u(g.size()), h(g.size());
    expert_linear(
        {s.tokens, route.rows, gate.w, x.data.as<char>(), x.stride, x.scale_offset, false, g.data(), s.inter * 4}, pool,
        cpu);
    expert_linear(
        {s.tokens, route.rows, up.w, x.data.as<char>(), x.stride, x.scale_offset, false, u.data(), s.inter * 4}, pool,
        cpu);
    activation_run(act, g.data(), s.inter * 4, u.data(), s.inter * 4, pairs, s.inter, h.data(), s.inter * 4, pool, cpu);
    return h;
  }

  // A scale that some rows of h exceed and others do not.
  float middle_scale(const ActivationParams& act) const {
    const std::vector<float> h = hidden(act, {});
    std::vector<float> scales;
    for (size_t at = 0; at < h.size(); at += size_t(s.inter)) {
      float m = 0;
      for (size_t i = at; i < at + size_t(s.inter); ++i) m = std::max(m, std::abs(h[i]));
      scales.push_back(m / 127);
    }
    std::sort(scales.begin(), scales.end());
    const size_t at = (scales.size() - 1) / 2;
    return (scales[at] + scales[at + 1]) / 2;
  }

  // The same through the single ops.
  std::vector<float> chain(const ActivationParams& act, const hw::CpuFeatures& cpu, StoredScale h_scale = {}) const {
    hw::ThreadPool pool(2);
    const int64_t pairs = s.tokens * s.k;
    std::vector<float> h = hidden(act, cpu), y(size_t(pairs * s.hidden)), out(size_t(s.tokens * s.hidden));
    AlignedBytes q(pairs * q8_row_bytes(s.inter));
    ExpertLinearArgs a{s.tokens, route.rows, down.w, h.data(), s.inter * 4, 0, true, y.data(), s.hidden * 4};
    if (gemm_takes_q8(s.down)) {
      quantize_run(h.data(), s.inter * 4, pairs, s.inter, q.as<char>(), q8_row_bytes(s.inter), pool, cpu, h_scale);
      a.x = q.as<char>();
      a.x_stride = q8_row_bytes(s.inter);
      a.x_scale_offset = q8_scale_offset(s.inter);
    }
    expert_linear(a, pool, cpu);
    expert_combine({s.tokens, s.hidden, route.rows, y.data(), s.hidden * 4, s.residual ? residual.as<float>() : nullptr,
                    s.hidden * 4, out.data(), s.hidden * 4},
                   pool, cpu);
    return out;
  }
};

const Shape kShapes[] = {
    {1, 8, 2, 64, 48, kI8, kI8, false, false, true},      {3, 4, 4, 70, 33, kI8, kI8, true, false, false},
    {150, 8, 2, 96, 100, kI8, kI8, true, false, true},    {200, 8, 2, 64, 64, kI8, kI8, false, true, true},
    {40, 512, 16, 32, 40, kI8, kI8, false, false, false}, {20, 8, 3, 50, 40, kF32, kF32, true, false, true},
    {20, 8, 3, 50, 40, kBF16, kBF16, false, false, true}, {20, 8, 3, 64, 70, kI8, kBF16, false, false, false},
    {20, 8, 3, 64, 70, kF32, kI8, true, true, true},      {1, 8, 2, 160, 48, kI4, kI4, false, false, true},
    {150, 8, 2, 96, 100, kI4, kI4, true, false, true},    {60, 8, 2, 300, 200, kI4, kI4, false, true, false},
    {20, 8, 3, 64, 70, kI4, kI8, false, false, false},    {20, 8, 3, 64, 150, kI8, kI4, true, false, true},
    {20, 8, 3, 64, 150, kF32, kI4, true, false, false},
};

TEST(GroupedExperts, EqualsTheChainOfSingleOpsOnEveryBuild) {
  for (const Shape& s : kShapes) {
    const MoeCase c(s);
    for (const ActivationParams& act : {kActivations[0], kActivations[4]}) {
      const std::vector<float> want = c.chain(act, {});
      for (const auto& cpu : moe_builds()) {
        EXPECT_TRUE(same_bits(c.chain(act, cpu), want)) << s.tokens << " tokens " << hw::describe(cpu);
        for (int threads : {1, 2, 3})
          EXPECT_TRUE(same_bits(c.grouped(act, threads, cpu), want))
              << s.tokens << " tokens, " << threads << " threads " << hw::describe(cpu);
      }
    }
  }
}

TEST(GroupedExperts, InPartsWithScatteredMatricesIsTheSame) {
  for (const Shape& s : kShapes) {
    const MoeCase c(s);
    std::vector<std::vector<int32_t>> halves(2), thirds(3), single(static_cast<size_t>(s.experts));
    for (int32_t e = 0; e < s.experts; ++e) {
      halves[e < s.experts / 3].push_back(e);
      thirds[size_t((e * 5 + 1) % 3)].push_back(e);
      single[size_t(s.experts - 1 - e)].push_back(e);
    }
    for (const auto& cpu : moe_builds())
      for (int threads : {1, 3}) {
        const std::vector<float> want = c.grouped(kActivations[0], threads, cpu);
        for (const auto& parts : {halves, thirds, single})
          EXPECT_TRUE(same_bits(c.grouped(kActivations[0], threads, cpu, {}, parts), want))
              << s.tokens << " tokens, " << parts.size() << " parts, " << threads << " threads " << hw::describe(cpu);
      }
  }
}

TEST(GroupedExperts, StoredScalesOfTheActivation) {
  for (const Shape& s : kShapes) {
    if (!gemm_takes_q8(s.down)) continue;
    const MoeCase c(s);
    const std::vector<float> own = c.chain(kActivations[0], {});
    const float middle = c.middle_scale(kActivations[0]);
    EXPECT_FALSE(same_bits(c.chain(kActivations[0], {}, {middle, true}), c.chain(kActivations[0], {}, {middle, false})));
    for (const bool saturate : {false, true}) {
      const StoredScale stored{middle, saturate};
      const std::vector<float> want = c.chain(kActivations[0], {}, stored);
      EXPECT_FALSE(same_bits(want, own));
      for (const auto& cpu : moe_builds())
        for (int threads : {1, 3}) EXPECT_TRUE(same_bits(c.grouped(kActivations[0], threads, cpu, stored), want)) << hw::describe(cpu);
    }
    EXPECT_TRUE(same_bits(c.grouped(kActivations[0], 2, hw::cpu(), {1e9f, true}), own));
  }
}

// Against plain loops over the row-major weights: catches what the chain and the fused kernel could get wrong together.
TEST(ExpertLinear, EachPairUsesItsExpert) {
  const Shape s{30, 6, 2, 40, 24, kF32, kF32, true, false, false};
  const MoeCase c(s);
  hw::ThreadPool pool(2);
  std::vector<float> y(size_t(s.tokens * s.k * s.inter));
  expert_linear({s.tokens, c.route.rows, c.gate.w, c.x.data.as<char>(), c.x.stride, 0, false, y.data(), s.inter * 4},
                pool);
  std::vector<float> some(y.size(), -1.0f);  // expert 4's pairs alone
  const int32_t only[] = {4};
  ExpertLinearArgs part{s.tokens, c.route.rows, c.gate.w, c.x.data.as<char>(), c.x.stride, 0, false, some.data(), s.inter * 4};
  part.only = only;
  expert_linear(part, pool);
  for (int64_t p = 0; p < s.tokens * s.k; ++p)
    for (int64_t n = 0; n < s.inter; ++n) {
      const size_t at = size_t(p * s.inter + n);
      EXPECT_EQ(some[at], c.route.rows.ids(p / s.k)[p % s.k] == 4 ? y[at] : -1.0f);
    }
  for (int64_t t = 0; t < s.tokens; ++t)
    for (int64_t j = 0; j < s.k; ++j) {
      const int64_t e = c.route.rows.ids(t)[j];
      for (int64_t n = 0; n < s.inter; ++n) {
        float acc = 0;
        for (int64_t d = 0; d < s.hidden; ++d)
          acc = std::fma(c.x.data.as<float>(t * c.x.stride)[d], c.gate.each[size_t(e)].f32[size_t(n * s.hidden + d)],
                         acc);
        ASSERT_EQ(y[size_t((t * s.k + j) * s.inter + n)], acc + c.gate.w.bias[e * c.gate.w.bias_stride + n])
            << t << ", " << j << ", " << n;
      }
    }
}

TEST(GroupedExperts, ATokenDoesNotDependOnTheOthers) {
  for (const Shape& s : {kShapes[2], kShapes[3]}) {
    const MoeCase c(s);
    const std::vector<float> all = c.grouped(kActivations[0], 2, hw::detect_cpu());
    for (int64_t t : {int64_t(0), int64_t(77), s.tokens - 1}) {
      std::vector<float> out(static_cast<size_t>(s.hidden));
      AlignedBytes scratch(grouped_scratch_bytes_per_token(s.k, s.hidden, s.inter, s.down));
      hw::ThreadPool pool(1);
      GroupedExpertsArgs a{1,
                           {c.route.data.as<char>(t * c.route.stride), c.route.stride, s.k},
                           c.gate.w,
                           c.up.w,
                           c.down.w,
                           kActivations[0],
                           c.x.data.as<char>(t * c.x.stride),
                           c.x.stride,
                           c.x.scale_offset,
                           c.residual.as<float>() + t * s.hidden,
                           s.hidden * 4,
                           out.data(),
                           s.hidden * 4,
                           scratch.as<char>()};
      grouped_experts(a, pool);
      EXPECT_EQ(std::memcmp(out.data(), &all[size_t(t * s.hidden)], out.size() * 4), 0) << "token " << t;
    }
  }
}

TEST(ExpertCombine, AscendingOrderStepByStep) {
  std::mt19937 rng(3);
  const int64_t tokens = 5, k = 3, cols = 21;
  const Route route(tokens, 6, k, false, rng);
  std::vector<float> y(size_t(tokens * k * cols)), out(size_t(tokens * cols)), residual(out.size());
  std::normal_distribution<float> normal;
  for (float& v : y) v = normal(rng);
  for (float& v : residual) v = normal(rng);
  hw::ThreadPool pool(2);
  expert_combine({tokens, cols, route.rows, y.data(), cols * 4, residual.data(), cols * 4, out.data(), cols * 4}, pool);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t c = 0; c < cols; ++c) {
      volatile float sum = 0;
      for (int64_t j = 0; j < k; ++j) {
        const volatile float p = route.rows.weights(t)[j] * y[size_t((t * k + j) * cols + c)];
        sum = sum + p;
      }
      EXPECT_EQ(out[size_t(t * cols + c)], sum + residual[size_t(t * cols + c)]);
    }
}

}  // namespace
}  // namespace mi::kernels
