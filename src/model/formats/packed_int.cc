#include "model/formats/packed_int.h"

#include "model/formats/codes.h"

namespace mi::model::formats {

void dequantize_rows(const PackedInt& m, int64_t first, int64_t n, float* out) {
  const int64_t per_word = 32 / m.bits, row_words = (m.cols + per_word - 1) / per_word;
  const uint32_t mask = (uint32_t(1) << m.bits) - 1;
  for (int64_t r = first; r < first + n; ++r) {
    const std::byte* row = m.words + r * row_words * 4;
    const float* scale = m.scale.data() + r * m.groups;
    const std::byte* zeros = m.zeros ? m.zeros + r / per_word * m.groups * 4 : nullptr;
    const int zero_shift = int(r % per_word) * m.bits;
    int32_t group = -1, zero = 1 << (m.bits - 1);
    uint32_t word = 0;
    for (int64_t c = 0; c < m.cols; ++c) {
      if (c % per_word == 0) word = word_at(row, c / per_word);
      const int32_t g = m.group_of[size_t(c)];
      if (g != group && zeros) zero = int32_t(word_at(zeros, g) >> zero_shift & mask);
      group = g;
      *out++ = float(int32_t(word & mask) - zero) * scale[g];
      word >>= m.bits;
    }
  }
}

}  // namespace mi::model::formats
