#pragma once
// GPTQ (AutoGPTQ, GPTQModel): integers of 2, 4 or 8 bits in 32-bit words, lowest bits first, stored [in, out].
//   `qweight` I32 [in * bits / 32, out], packed along in
//   `qzeros`  I32 [groups, out * bits / 32], packed along out; version 1 (checkpoint_format gptq) stores zero - 1,
//             version 2 (gptq_v2) the zero itself
//   `scales`  F16 or BF16 [groups, out]
//   `g_idx`   I32 [in]: the group of each input, not monotonic with desc_act
//   w[out, in] = (q[in, out] - zero[g, out]) * scale[g, out]
// Source: github.com/ModelCloud/GPTQModel, nn_modules/qlinear.

#include <cstddef>
#include <cstdint>
#include <span>

namespace mi::model::formats {

struct Gptq {
  int bits = 4;                        // divides 32
  const std::byte* qweight = nullptr;  // I32 [cols * bits / 32, rows]
  const std::byte* qzeros = nullptr;   // I32 [groups, rows * bits / 32]
  int32_t zero_offset = 0;             // added to a stored zero: 1 for version 1
  int64_t rows = 0, cols = 0;          // out, in
  std::span<const float> scale;        // [groups, rows]
  std::span<const int32_t> group_of;   // [cols], each below groups
};

void dequantize_rows(const Gptq& m, int64_t first, int64_t n, float* out);

}  // namespace mi::model::formats
