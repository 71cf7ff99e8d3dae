#pragma once
// The last steps of a product, 16 columns of one row at a time: gemm/args.h has the formula. Included by the kernels'
// files.

#include "kernels/gemm/args.h"
#include "kernels/simd.h"

namespace mi::kernels::MI_ISA {

template <typename T>
static inline T* gemm_row(T* base, int64_t stride, int64_t row) {
  return (T*)((char*)base + row * stride);
}
static inline int64_t gemm_x_row(const GemmArgs& a, int64_t i) { return a.x_rows ? a.x_rows[i] : i; }
static inline int64_t gemm_y_row(const GemmArgs& a, int64_t i) { return a.y_rows ? a.y_rows[i] : i; }
static inline const int8_t* gemm_x_i8(const GemmArgs& a, int64_t i) {
  return (const int8_t*)a.x + gemm_x_row(a, i) * a.x_stride;
}
static inline const float* gemm_x_f32(const GemmArgs& a, int64_t i) {
  return gemm_row((const float*)a.x, a.x_stride, gemm_x_row(a, i));
}
static inline float gemm_x_scale(const GemmArgs& a, const int8_t* row) {
  float s;
  memcpy(&s, row + a.x_scale_offset, sizeof s);
  return s;
}

// int4: the scales of 16 columns, at = tile * groups + group.
static inline V16 gemm_i4_scale(const GemmArgs& a, int64_t at) {
  return a.w_scale_bf16 ? v_load_bf16(a.w_scale_bf16 + at * 16) : v_load(a.w_scale + at * 16);
}

// v: the sums (float weights) or scaled sums (int8, int4) of row i, columns tile * 16 ..
static inline void gemm_finish(const GemmArgs& a, int64_t i, int64_t tile, V16 v) {
  const int64_t col = tile * 16, row = gemm_y_row(a, i);
  const int64_t cols = a.n - col < 16 ? a.n - col : 16;
  float* y = gemm_row(a.y, a.y_stride, row) + col;
  const float* residual = a.residual ? gemm_row(a.residual, a.residual_stride, row) + col : nullptr;
  if (cols == 16) {
    if (a.bias) v = v + v_load(a.bias + col);
    if (a.out_scale != 1.0f) v = v * v_set(a.out_scale);
    if (residual) v = v + v_load(residual);
    v_store(y, v);
  } else {
    if (a.bias) v = v + v_load_n(a.bias + col, cols);
    if (a.out_scale != 1.0f) v = v * v_set(a.out_scale);
    if (residual) v = v + v_load_n(residual, cols);
    v_store_n(y, v, cols);
  }
}

// acc: exact int32 sums, modulo 2^32 when `shifted` (activations were u8 = q + 128: the column sums are still to
// subtract).
static inline void gemm_finish_i8(const GemmArgs& a, int64_t i, int64_t tile, I16 acc, bool shifted, float x_scale) {
  if (shifted) {
    U16 colsum;
    memcpy(&colsum, a.w_colsum + tile * 16, 64);
    acc = (I16)((U16)acc - colsum);
  }
  V16 v = __builtin_convertvector(acc, V16) * v_set(x_scale);
  gemm_finish(a, i, tile, v * v_load(a.w_scale + tile * 16));
}

}  // namespace mi::kernels::MI_ISA
