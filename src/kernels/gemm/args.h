#pragma once
// The arguments of one matrix product, plain data: also read by the files with ISA suffixes.
//
//   y[m, n] = x[m, k] * W[n, k]^T     W packed as in gemm/pack.h; all strides in bytes
//
// int8 (x: kQ8 rows, W: int8 with a scale per output column):
//   acc  = sum over k of x_q * w_q                                  exact in int32 (k <= kMaxK)
//   y    = ((float(acc) * x_scale) * w_scale[n] + bias[n]) * out_scale + residual
// int4 (x: kQ8 rows, W: 4 bits, q in [-8, 7], with a scale per output column and group of consecutive k):
//   acc_g = sum over the group's k of x_q * w_q                     exact in int32
//   t    = fma(float(acc_g), w_scale[g][n], t)                      one chain from 0, g ascending; float(acc_g) is exact
//   y    = (t * x_scale + bias[n]) * out_scale + residual
// float (x: float rows, W: float or bfloat16, widened exactly):
//   acc  = fma(x[k-1], w[k-1], ... fma(x[0], w[0], 0))              one chain, k ascending
//   y    = (acc + bias[n]) * out_scale + residual
// Each +, * and conversion rounds once, in this order; a term that is absent is not added. So an element depends on its
// own row and column only, never on m, blocking, threads or the ISA: all kernels of a format return the same bits.

#include <stdint.h>

namespace mi::kernels {

enum class GemmFormat : uint8_t { kI8, kBF16, kF32, kI4 };  // of the packed weights

struct GemmArgs {
  int64_t m = 0, n = 0, k = 0;  // true sizes
  // Row i of x is at x + row(i) * x_stride, row(i) = x_rows ? x_rows[i] : i. int8 and int4: bytes [k, pad_k(k)) of a row must be
  // readable, their values do not matter; values are in [-127, 127]; the row's scale is the float x_scale_offset bytes
  // after the row's start.
  const void* x = nullptr;
  int64_t x_stride = 0;
  const int32_t* x_rows = nullptr;
  int64_t x_scale_offset = 0;
  const void* w = nullptr;            // packed [pad_n(n), pad_k(k)]
  // int8: [pad_n(n)]; int4: [pad_n(n)/16][groups][16], groups = ceil(k / group), here or as bfloat16 in w_scale_bf16.
  const float* w_scale = nullptr;
  const uint16_t* w_scale_bf16 = nullptr;
  const int32_t* w_colsum = nullptr;  // int8: [pad_n(n)], colsum_i8()
  int64_t group = 0;                  // int4: 32, 64 or 128
  const void* w_next = nullptr;       // what the thread will read after these weights, to be fetched early; or none
  bool same_x = false;  // the last call with this scratch had the same x, rows, k, format and group: what it made of x is still there
  const float* bias = nullptr;        // [n], or none
  float out_scale = 1;
  const float* residual = nullptr;  // rows as y's, or none; may be y itself
  int64_t residual_stride = 0;
  float* y = nullptr;  // row i is at y + row(i) * y_stride, row(i) = y_rows ? y_rows[i] : i
  int64_t y_stride = 0;
  const int32_t* y_rows = nullptr;
  bool stream_y = false;  // y is more than caches hold, and its rows are 64-byte aligned: a kernel may write past them
};

// The part of a product that one call computes: rows [m_begin, m_end), columns of the 16-wide tiles [tile_begin,
// tile_end).
struct GemmRange {
  int64_t m_begin = 0, m_end = 0;
  int64_t tile_begin = 0, tile_end = 0;
};

inline constexpr int64_t kMaxK = 131072;       // 127 * 128 * kMaxK fits in int32
inline constexpr int64_t kMaxRangeRows = 128;  // rows of one GemmRange

// scratch: gemm_scratch_bytes(k), 64-byte aligned, the calling thread's own.
using GemmFn = void (*)(const GemmArgs& a, const GemmRange& r, void* scratch);

}  // namespace mi::kernels
