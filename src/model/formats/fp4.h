#pragma once
// Two E2M1 numbers in a byte, the low nibble first, and one scale for each group of a row.
//   compressed-tensors nvfp4-pack-quantized: `weight_packed` U8 [out, in / 2], `weight_scale` F8_E4M3 [out, in / 16],
//     `weight_global_scale` F32 [1]:                w = e2m1 * (scale / global)
//   ModelOpt NVFP4 (nvidia): `weight` U8, `weight_scale` F8_E4M3, `weight_scale_2` F32 []: w = e2m1 * (scale * scale_2)
//   compressed-tensors mxfp4-pack-quantized: `weight_packed` U8, `weight_scale` U8 E8M0 [out, in / 32]
//   gpt-oss MXFP4: `NAME_blocks` U8 [experts, out, in / 32, 16], `NAME_scales` U8 E8M0 [experts, out, in / 32];
//   out-major,
//     while the same model in bf16 is in-major (openai/gpt-oss, gpt_oss/torch/weights.py)
// The scale here is the whole factor of a group.

#include <cstddef>
#include <cstdint>
#include <span>

namespace mi::model::formats {

struct Fp4 {
  const std::byte* nibbles = nullptr;      // [rows, cols / 2]
  int64_t rows = 0, cols = 0, group = 32;  // group divides cols and is even
  std::span<const float> scale;            // [rows, cols / group]
};

void dequantize_rows(const Fp4& m, int64_t first, int64_t n, float* out);

}  // namespace mi::model::formats
