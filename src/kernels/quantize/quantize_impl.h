#pragma once
// Body of quantize.h's rows for one ISA; included once by each quantize_<isa>.cc.

#include "kernels/quantize/quantize_row.h"

namespace mi::kernels::MI_ISA {

void quantize_rows_impl(const float* x, int64_t x_stride, int64_t rows, int64_t cols, void* q, int64_t q_stride,
                        float fixed_scale) {
  for (int64_t i = 0; i < rows; ++i) {
    const float* row = (const float*)((const char*)x + i * x_stride);
    int8_t* out = (int8_t*)q + i * q_stride;
    if (fixed_scale > 0)
      quantize_row_by(row, cols, fixed_scale, 1.0f / fixed_scale, out);
    else
      quantize_row(row, cols, out);
  }
}

}  // namespace mi::kernels::MI_ISA
