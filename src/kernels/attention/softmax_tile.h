#pragma once
// One block's step of the online softmax for R rows, between the two products: shared by the builds of attention.

#include "kernels/attention/block.h"
#include "kernels/simd.h"

namespace mi::kernels::MI_ISA {

// 16 scores, scaled, and -inf where the mask's low bits are 0.
static inline V16 scaled_scores(const float* s, uint64_t mask, float scale, float softcap) {
  V16 v = v_load(s) * v_set(scale);
  if (softcap > 0) v = v_tanh(v / v_set(softcap)) * v_set(softcap);
#if defined(__AVX512F__)
  return (V16)_mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), __mmask16(mask), (__m512)v);
#else
  const uint32_t bits = uint32_t(mask) & 0xffff;
  if (bits == 0xffff) return v;
  float t[16];
  v_store(t, v);
  for (int i = 0; i < 16; ++i) t[i] = (bits >> i) & 1 ? t[i] : -__builtin_inff();
  return v_load(t);
#endif
}

// Scaled and masked scores of one row, in place; returns the largest. Whole vectors up to n.
static inline float mask_scores(float* s, uint64_t mask, int64_t n, float scale, float softcap) {
  V16 top = v_set(-__builtin_inff());
  for (int64_t j = 0; j < n; j += 16) {
    const V16 v = scaled_scores(s + j, mask >> j, scale, softcap);
    v_store(s + j, v);
    top = v_max(v, top);
  }
  return v_max_lane(top);
}

// Masked scores to weights exp(s - base), in place; returns their sum.
static inline float weights(float* s, int64_t n, float base) {
  V16 x[kBlock / 16];
  for (int c = 0; c < kBlock / 16; ++c) {
    x[c] = v_zero();
    if (16 * c >= n) continue;
    x[c] = v_exp_below(v_load(s + 16 * c) - v_set(base));
    v_store(s + 16 * c, x[c]);
  }
  return v_sum((x[0] + x[1]) + (x[2] + x[3]));
}

// Rows [row, row + R) of a: their sums of products s [R][64] become weights, m and l go on; factor [16]: what o is to
// be multiplied by.
template <int R>
static inline void softmax_tile(const BlockArgs& a, int64_t row, int64_t n, float* s, float* factor) {
  float* m = a.state.m + row;
  float* l = a.state.l + row;
  float base[R];
  for (int i = 0; i < 16; ++i) factor[i] = 0;
  for (int r = 0; r < R; ++r) {
    const float top = mask_scores(s + r * kBlock, a.masks[row + r], n, a.scale, a.softcap);
    const float m_new = top > m[r] ? top : m[r];
    // Nothing seen yet (or NaN alone): subtracting 0 keeps the weights at 0.
    base[r] = m_new == -__builtin_inff() ? 0.0f : m_new;
    factor[r] = m[r] - base[r];
    m[r] = m_new;
  }
  v_store(factor, v_exp_below(v_load(factor)));
  for (int r = 0; r < R; ++r) l[r] = l[r] * factor[r] + weights(s + r * kBlock, n, base[r]);
}

// Positions that any of R rows takes part in: [begin, end), none when empty; n = end rounded up to whole vectors.
struct Span {
  int64_t begin = 0, end = 0, n = 0;
};
template <int R>
static inline Span span_of(const uint64_t* masks) {
  uint64_t any = 0;
  for (int r = 0; r < R; ++r) any |= masks[r];
  if (any == 0) return {};
  const int64_t end = 64 - __builtin_clzll(any);
  return {__builtin_ctzll(any), end, (end + 15) / 16 * 16};
}

}  // namespace mi::kernels::MI_ISA
