#pragma once
// compressed-tensors pack-quantized (W4A16, W8A16): unsigned integers of 4 or 8 bits in 32-bit words, lowest bits
// first, along the inputs.
//   `weight_packed`      I32 [out, ceil(in * bits / 32)]   the number + 2^(bits - 1), or the raw one when asymmetric
//   `weight_scale`       [out, groups]
//   `weight_zero_point`  I32 [ceil(out * bits / 32), groups], asymmetric only: packed along **out**
//   `weight_shape`       I64 or I32 [2]: out, in
//   `weight_g_idx`       I32 [in], only with actorder "group": the group of each input
//   w[r, c] = (packed[r, c] - zero[r, g(c)]) * scale[r, g(c)]
// Source: github.com/vllm-project/compressed-tensors, compressors/pack_quantized.

#include <cstddef>
#include <cstdint>
#include <span>

namespace mi::model::formats {

struct PackedInt {
  int bits = 4;                      // divides 32
  const std::byte* words = nullptr;  // I32 [rows, ceil(cols * bits / 32)]
  int64_t rows = 0, cols = 0, groups = 1;
  std::span<const float> scale;       // [rows, groups]
  const std::byte* zeros = nullptr;   // I32 [ceil(rows * bits / 32), groups]; nullptr: 2^(bits - 1) everywhere
  std::span<const int32_t> group_of;  // [cols], each below groups
};

void dequantize_rows(const PackedInt& m, int64_t first, int64_t n, float* out);

}  // namespace mi::model::formats
