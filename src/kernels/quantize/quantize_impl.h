#pragma once
// Body of quantize.h's rows for one ISA; included once by each quantize_<isa>.cc.

#include "kernels/quantize/quantize_row.h"
#include "kernels/quantize/stored_scale.h"

namespace mi::kernels::MI_ISA {

void quantize_rows_impl(const float* x, int64_t x_stride, int64_t rows, int64_t cols, void* q, int64_t q_stride,
                        StoredScale stored) {
  for (int64_t i = 0; i < rows; ++i) {
    const float* row = (const float*)((const char*)x + i * x_stride);
    int8_t* out = (int8_t*)q + i * q_stride;
    const float m = stored.value > 0 && !stored.saturate ? 0 : quantize_max_abs(row, cols);
    if (stored.value > 0 && (!stored.saturate || m / 127.0f > stored.value))
      quantize_row_by(row, cols, stored.value, 1.0f / stored.value, out);
    else
      quantize_row(row, cols, m, out);
  }
}

}  // namespace mi::kernels::MI_ISA
