#pragma once
// Body of quantize.h's rows for one ISA; included once by each quantize_<isa>.cc.

#include "kernels/quantize/quantize_row.h"

namespace mi::kernels::MI_ISA {

void quantize_rows_impl(const float* x, int64_t x_stride, int64_t rows, int64_t cols, void* q, int64_t q_stride) {
  for (int64_t i = 0; i < rows; ++i) quantize_row((const float*)((const char*)x + i * x_stride), cols, (int8_t*)q + i * q_stride);
}

}  // namespace mi::kernels::MI_ISA
