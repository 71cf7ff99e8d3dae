#pragma once
// One row of quantize.h, for kernels that have the floats at hand (norm+quantize, the experts' requantize). Included by
// files with ISA suffixes only.

#include "kernels/simd.h"

namespace mi::kernels::MI_ISA {

// NaN to 0, infinities to the largest float.
static inline V16 quantize_sane(V16 x) {
  const V16 big = v_set(3.40282347e+38f);
  x = x == x ? x : v_zero();
  return v_min(v_max(x, -big), big);
}

// max |x| as quantize.h counts it.
static inline float quantize_max_abs(const float* x, int64_t n) {
  V16 m = v_zero();
  int64_t j = 0;
  for (; j + 16 <= n; j += 16) m = v_max(m, v_abs(quantize_sane(v_load(x + j))));
  if (j < n) m = v_max(m, v_abs(quantize_sane(v_load_n(x + j, n - j))));
  return v_max_lane(m);
}

// q8 row of x with the given scale; factor is what x is multiplied by. Products beyond +-127 are cut.
static inline void quantize_row_by(const float* x, int64_t n, float scale, float factor, int8_t* q) {
  const V16 inv = v_set(factor), top = v_set(127.0f);
  const int64_t end = (n + 63) / 64 * 64;
  int64_t j = 0;
  for (; j + 16 <= n; j += 16)
    v_store_i8(q + j, v_to_int(v_round(v_min(v_max(quantize_sane(v_load(x + j)) * inv, -top), top))));
  for (; j < end; j += 16) {
    const int64_t left = n > j ? n - j : 0;
    v_store_i8(q + j, v_to_int(v_round(v_min(v_max(quantize_sane(v_load_n(x + j, left)) * inv, -top), top))));
  }
  memcpy(q + end, &scale, sizeof scale);
}

// x [n] with the largest magnitude m -> q [n], zeros up to a multiple of 64, then the scale: a whole q8 row.
static inline void quantize_row(const float* x, int64_t n, float m, int8_t* q) {
  const bool usable = m >= 7.88860905e-31f;  // 2^-100
  quantize_row_by(x, n, usable ? m / 127.0f : 0.0f, usable ? 127.0f / m : 0.0f, q);
}

}  // namespace mi::kernels::MI_ISA
