#pragma once
// A dense row-major tensor somebody else owns.

#include <span>
#include <string>
#include <vector>

#include "tensor/dtype.h"

namespace mi {

using Shape = std::vector<int64_t>;

// "[32, 64]"
std::string shape_text(const Shape& s);
// Number of elements; nullopt when a dimension is negative or the product overflows int64.
std::optional<int64_t> shape_count(const Shape& s);

struct TensorView {
  DType dtype = DType::kF32;
  Shape shape;
  const std::byte* data = nullptr;  // [shape...], row-major, not owned
  size_t bytes = 0;
  int64_t count() const { return int64_t(bytes / dtype_bytes(dtype)); }
};

// An owning tensor; only where sizes are moderate (tests, one layer's statistics, a tensor being rewritten).
struct Tensor {
  DType dtype = DType::kF32;
  Shape shape;
  std::vector<std::byte> data;
  TensorView view() const { return {dtype, shape, data.data(), data.size()}; }
};
Tensor make_tensor(DType t, Shape shape);              // zero-filled
Tensor tensor_f32(Shape shape, std::span<const float> values);
std::vector<float> to_f32_vector(const TensorView& v);  // widened copy

}  // namespace mi
