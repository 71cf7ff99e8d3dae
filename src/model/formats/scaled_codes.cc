#include "model/formats/scaled_codes.h"

#include <algorithm>

#include "model/formats/codes.h"

namespace mi::model::formats {

void dequantize_rows(const ScaledCodes& m, int64_t first, int64_t n, float* out) {
  const int64_t grid_cols = (m.cols + m.block_cols - 1) / m.block_cols;
  for (int64_t r = first; r < first + n; ++r) {
    const std::byte* codes = m.codes + r * m.cols;
    for (int64_t g = 0; g < grid_cols; ++g) {
      const size_t block = size_t(r / m.block_rows * grid_cols + g);
      const float scale = m.scale[block], zero = m.zero.empty() ? 0.0f : m.zero[block];
      const int64_t end = std::min(m.cols, (g + 1) * m.block_cols);
      if (m.kind == ScaledCodes::Kind::kE4M3)
        for (int64_t c = g * m.block_cols; c < end; ++c) *out++ = kE4M3[uint8_t(codes[c])] * scale;
      else
        for (int64_t c = g * m.block_cols; c < end; ++c) *out++ = (float(int8_t(codes[c])) - zero) * scale;
    }
  }
}

}  // namespace mi::model::formats
