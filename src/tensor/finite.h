#pragma once
// Numbers that are none: a NaN or an infinity among weights means a damaged file, and is named by its place.

#include <string>

#include "tensor/tensor_view.h"

namespace mi {

// The first NaN or infinity of `count` elements (F32, BF16 or F16; other types hold none), or -1.
int64_t first_not_finite(const std::byte* data, DType t, int64_t count);

// "a NaN (expert 3, row 5, column 0)" of an element of a tensor of this shape, or "(row 5, column 0)", "(element 7)".
std::string not_finite_text(const TensorView& v, int64_t element);

}  // namespace mi
