#pragma once
// AWQ in its gemm form: 4-bit integers, eight in a 32-bit word along the **outputs**, in the order of the kernel that
// the format was made for: nibble i from the low end holds output 8 w + order[i], order = 0 2 4 6 1 3 5 7.
//   `qweight` I32 [in, out / 8], `qzeros` I32 [groups, out / 8], `scales` F16 or BF16 [groups, out]
//   w[out, in] = (q - zero) * scale, nothing added to the zero
// Source: github.com/casper-hansen/AutoAWQ, awq/utils/packing_utils.py.

#include <cstddef>
#include <cstdint>
#include <span>

namespace mi::model::formats {

struct Awq {
  const std::byte* qweight = nullptr;  // I32 [cols, rows / 8]
  const std::byte* qzeros = nullptr;   // I32 [groups, rows / 8]
  int64_t rows = 0, cols = 0;          // out, in; rows is a multiple of 8
  int64_t group = 128;                 // inputs of one scale
  std::span<const float> scale;        // [ceil(cols / group), rows]
};

void dequantize_rows(const Awq& m, int64_t first, int64_t n, float* out);

}  // namespace mi::model::formats
