#pragma once
// Rows of floats to kQ8 rows: symmetric int8 with one scale per row.
//
//   m     = max |x_j|             over the row; a NaN counts as 0, an infinity as the largest float
//   scale = m / 127
//   q_j   = rint(x_j * (127 / m)) ties to even, so |q_j| <= 127
// With a stored scale s (from calibration; 0: none): scale = s, q_j = clamp(rint(x_j * (1 / s)), -127, 127); of a scale that
// saturates, only in rows whose own m / 127 is above s.
// A row with m < 2^-100 (zeros, and what no scale can represent) gets scale 0 and q = 0. The same bits on every ISA.

#include <cstdint>

#include "hw/cpu.h"
#include "hw/thread_pool.h"
#include "kernels/quantize/stored_scale.h"

namespace mi::kernels {

// A kQ8 row: int8 [cols], zeros up to a multiple of 64, then a 64-byte line whose first 4 bytes are the scale.
constexpr int64_t q8_scale_offset(int64_t cols) { return (cols + 63) / 64 * 64; }
constexpr int64_t q8_row_bytes(int64_t cols) { return q8_scale_offset(cols) + 64; }

// x: `rows` rows of `cols` floats, x_stride bytes apart; q: q8 rows, q_stride bytes apart. Padding bytes up to
// q8_scale_offset(cols) are written as zeros.
void quantize_rows(const float* x, int64_t x_stride, int64_t rows, int64_t cols, void* q, int64_t q_stride,
                   const hw::CpuFeatures& cpu = hw::cpu(), StoredScale stored = {});
// The same, rows split over the pool.
void quantize_run(const float* x, int64_t x_stride, int64_t rows, int64_t cols, void* q, int64_t q_stride,
                  hw::ThreadPool& pool, const hw::CpuFeatures& cpu = hw::cpu(), StoredScale stored = {});
// The inverse, for taps and tests: out[j] = q_j * scale.
void dequantize_row(const void* q, int64_t cols, float* out);

}  // namespace mi::kernels
