#pragma once
// One byte per number and a grid of scales over blocks of the matrix:
//   w[r, c] = code[r, c] * scale[r / block_rows, c / block_cols]
// Blocks at the edges are cut: 192 rows in blocks of 128 are 128 + 64. What is stored so:
//   compressed-tensors int-quantized, float-quantized, mxfp8-quantized: `weight` I8 or F8_E4M3 [out, in],
//     `weight_scale` [1] (tensor), [out, 1] (channel), [out, in / g] (group) or [ceil(out / b), ceil(in / b)] (block);
//     asymmetric int8 has `weight_zero_point` of the same grid (github.com/vllm-project/compressed-tensors)
//   DeepSeek's and its followers' FP8: `weight` F8_E4M3, `weight_scale_inv` [ceil(out / 128), ceil(in / 128)], which is
//     multiplied despite its name (deepseek-ai/DeepSeek-V3, inference/kernel.py); MXFP8 with blocks [1, 32] of E8M0

#include <cstddef>
#include <cstdint>
#include <span>

namespace mi::model::formats {

struct ScaledCodes {
  enum class Kind : uint8_t { kInt8, kE4M3 } kind = Kind::kInt8;
  const std::byte* codes = nullptr;  // [rows, cols]
  int64_t rows = 0, cols = 0;
  int64_t block_rows = 1, block_cols = 1;
  std::span<const float> scale;  // [ceil(rows / block_rows), ceil(cols / block_cols)]
  std::span<const float> zero;   // the same grid, subtracted from the code before; empty: symmetric
};

// Rows [first, first + n), row-major, in float: (code - zero) * scale, rounded once.
void dequantize_rows(const ScaledCodes& m, int64_t first, int64_t n, float* out);

}  // namespace mi::model::formats
