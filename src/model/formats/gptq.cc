#include "model/formats/gptq.h"

#include "model/formats/codes.h"

namespace mi::model::formats {

void dequantize_rows(const Gptq& m, int64_t first, int64_t n, float* out) {
  const int64_t per_word = 32 / m.bits, zero_words = m.rows / per_word;
  const uint32_t mask = (uint32_t(1) << m.bits) - 1;
  // Input by input, since neighbouring outputs lie beside each other in the file.
  for (int64_t c = 0; c < m.cols; ++c) {
    const std::byte* words = m.qweight + c / per_word * m.rows * 4;
    const int shift = int(c % per_word) * m.bits;
    const int64_t g = m.group_of[size_t(c)];
    const float* scale = m.scale.data() + g * m.rows;
    for (int64_t r = first; r < first + n; ++r) {
      const uint32_t q = word_at(words, r) >> shift & mask;
      const uint32_t z = word_at(m.qzeros, g * zero_words + r / per_word) >> (int(r % per_word) * m.bits) & mask;
      out[(r - first) * m.cols + c] = float(int32_t(q) - int32_t(z) - m.zero_offset) * scale[r];
    }
  }
}

}  // namespace mi::model::formats
