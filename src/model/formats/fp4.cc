#include "model/formats/fp4.h"

#include "model/formats/codes.h"

namespace mi::model::formats {

void dequantize_rows(const Fp4& m, int64_t first, int64_t n, float* out) {
  const int64_t groups = m.cols / m.group;
  const std::byte* in = m.nibbles + first * (m.cols / 2);
  for (int64_t g = first * groups; g < (first + n) * groups; ++g)
    for (int64_t i = 0; i < m.group; i += 2) {
      const uint8_t b = uint8_t(*in++);
      *out++ = kE2M1[b & 15] * m.scale[size_t(g)];
      *out++ = kE2M1[b >> 4] * m.scale[size_t(g)];
    }
}

}  // namespace mi::model::formats
