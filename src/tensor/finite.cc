#include "tensor/finite.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace mi {
namespace {

// An exponent of ones. Without an early end within a block, so that it vectorizes: every number of a model passes here.
template <typename Bits>
int64_t first(const std::byte* data, int64_t count, Bits exponent) {
  const Bits* v = reinterpret_cast<const Bits*>(data);
  constexpr int64_t kBlock = 4096;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    uint32_t found = 0;
    for (int64_t i = begin; i < end; ++i) found |= uint32_t((v[i] & exponent) == exponent);
    if (found == 0) continue;
    for (int64_t i = begin; i < end; ++i)
      if ((v[i] & exponent) == exponent) return i;
  }
  return -1;
}

}  // namespace

int64_t first_not_finite(const std::byte* data, DType t, int64_t count) {
  switch (t) {
    case DType::kF32:
      return first<uint32_t>(data, count, 0x7f800000u);
    case DType::kBF16:
      return first<uint16_t>(data, count, 0x7f80);
    case DType::kF16:
      return first<uint16_t>(data, count, 0x7c00);
    default:
      return -1;
  }
}

std::string not_finite_text(const TensorView& v, int64_t element) {
  float f = 0;
  convert_to_f32(v.data + size_t(element) * dtype_bytes(v.dtype), v.dtype, &f, 1);
  const size_t d = v.shape.size();
  const int64_t cols = d > 0 ? v.shape[d - 1] : 1, rows = d > 1 ? v.shape[d - 2] : 1;
  const std::string place =
      d < 2    ? fmt::format("element {}", element)
      : d == 2 ? fmt::format("row {}, column {}", element / cols, element % cols)
               : fmt::format("expert {}, row {}, column {}", element / cols / rows, element / cols % rows, element % cols);
  return fmt::format("{} ({})", std::isnan(f) ? "a NaN" : "an infinity", place);
}

}  // namespace mi
