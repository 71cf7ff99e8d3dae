#include "tensor/tensor_view.h"

#include <cstring>

#include "base/check.h"

namespace mi {

std::string shape_text(const Shape& s) {
  std::string t = "[";
  for (size_t i = 0; i < s.size(); ++i) t += (i ? ", " : "") + std::to_string(s[i]);
  return t + "]";
}

std::optional<int64_t> shape_count(const Shape& s) {
  int64_t n = 1;
  for (int64_t d : s) {
    if (d < 0 || __builtin_mul_overflow(n, d, &n)) return std::nullopt;
  }
  return n;
}

Tensor make_tensor(DType t, Shape shape) {
  const auto n = shape_count(shape);
  MI_CHECK(n.has_value(), "bad shape {}", shape_text(shape));
  return {t, std::move(shape), std::vector<std::byte>(size_t(*n) * dtype_bytes(t))};
}

Tensor tensor_f32(Shape shape, std::span<const float> values) {
  Tensor t = make_tensor(DType::kF32, std::move(shape));
  MI_CHECK_EQ(t.data.size(), values.size_bytes());
  if (!values.empty()) std::memcpy(t.data.data(), values.data(), values.size_bytes());
  return t;
}

std::vector<float> to_f32_vector(const TensorView& v) {
  std::vector<float> out(static_cast<size_t>(v.count()));
  convert_to_f32(v.data, v.dtype, out.data(), out.size());
  return out;
}

}  // namespace mi
