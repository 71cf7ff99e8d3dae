#include "model/formats/awq.h"

#include "model/formats/codes.h"

namespace mi::model::formats {

void dequantize_rows(const Awq& m, int64_t first, int64_t n, float* out) {
  // Where output 8 w + j sits: the inverse of the order above.
  constexpr int kShift[8] = {0, 16, 4, 20, 8, 24, 12, 28};
  const int64_t words = m.rows / 8;
  for (int64_t c = 0; c < m.cols; ++c) {
    const int64_t g = c / m.group;
    const float* scale = m.scale.data() + g * m.rows;
    for (int64_t r = first; r < first + n; ++r) {
      const int shift = kShift[r % 8];
      const uint32_t q = word_at(m.qweight, c * words + r / 8) >> shift & 15;
      const uint32_t z = word_at(m.qzeros, g * words + r / 8) >> shift & 15;
      out[(r - first) * m.cols + c] = float(int32_t(q) - int32_t(z)) * scale[r];
    }
  }
}

}  // namespace mi::model::formats
