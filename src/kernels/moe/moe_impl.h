#pragma once
// Bodies of the activations and of the combine for one ISA; included once by each moe_<isa>.cc. The formulas are in
// activation.h and grouped.h.

#include "kernels/moe/kinds.h"
#include "kernels/simd.h"

namespace mi::kernels::MI_ISA {

static inline V16 act_gelu(V16 g, V16 t) { return g * (v_set(0.5f) * (v_set(1.0f) + t)); }

template <int kKind>
static inline V16 act(V16 g, V16 u, float alpha, float limit) {
  if constexpr (kKind == kActSilu) return (g * v_sigmoid(g)) * u;
  if constexpr (kKind == kActGelu) return act_gelu(g, v_erf(g * v_set(0.707106781186547524f))) * u;
  if constexpr (kKind == kActGeluTanh) {
    const V16 cube = (g * g) * g;
    return act_gelu(g, v_tanh(v_set(0.797884560802865356f) * (g + v_set(0.044715f) * cube))) * u;
  }
  if constexpr (kKind == kActRelu) return (g < v_zero() ? v_zero() : g) * u;  // keeps NaN
  if constexpr (kKind == kActSwigluOai) {
    if (limit > 0) {
      const V16 hi = v_set(limit), lo = v_set(-limit);
      g = g > hi ? hi : g;
      u = u > hi ? hi : u;
      u = u < lo ? lo : u;
    }
    return (u + v_set(1.0f)) * (g * v_sigmoid(v_set(alpha) * g));
  }
}

template <int kKind>
static void act_rows(const ActArgs& a) {
  for (int64_t i = 0; i < a.rows; ++i) {
    const float* g = (const float*)((const char*)a.gate + i * a.gate_stride);
    const float* u = (const float*)((const char*)a.up + i * a.up_stride);
    const int64_t row = a.h_rows ? a.h_rows[i] : i;
    float* h = (float*)((char*)a.h + row * a.h_stride);
    int64_t j = 0;
    for (; j + 16 <= a.cols; j += 16) v_store(h + j, act<kKind>(v_load(g + j), v_load(u + j), a.alpha, a.limit));
    if (j < a.cols) {
      const int64_t n = a.cols - j;
      v_store_n(h + j, act<kKind>(v_load_n(g + j, n), v_load_n(u + j, n), a.alpha, a.limit), n);
    }
  }
}

void activation_impl(const ActArgs& a) {
  switch (a.kind) {
    case kActSilu:
      return act_rows<kActSilu>(a);
    case kActGelu:
      return act_rows<kActGelu>(a);
    case kActGeluTanh:
      return act_rows<kActGeluTanh>(a);
    case kActRelu:
      return act_rows<kActRelu>(a);
    default:
      return act_rows<kActSwigluOai>(a);
  }
}

// One token: its k rows of y, y_stride bytes apart.
void combine_impl(const float* weights, const float* y, int64_t y_stride, int64_t k, int64_t cols,
                  const float* residual, float* out) {
  auto sum = [&](int64_t c, auto load) __attribute__((always_inline)) {
    V16 s = v_zero();
    for (int64_t j = 0; j < k; ++j) s = s + v_set(weights[j]) * load((const float*)((const char*)y + j * y_stride) + c);
    return residual ? s + load(residual + c) : s;
  };
  int64_t c = 0;
  for (; c + 16 <= cols; c += 16) v_store(out + c, sum(c, [](const float* p) { return v_load(p); }));
  if (c < cols) v_store_n(out + c, sum(c, [&](const float* p) { return v_load_n(p, cols - c); }), cols - c);
}

}  // namespace mi::kernels::MI_ISA
