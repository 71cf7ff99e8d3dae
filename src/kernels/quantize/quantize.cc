#include "kernels/quantize/quantize.h"

#include <cstring>

#include "base/check.h"
#include "kernels/dispatch.h"
#include "kernels/rows.h"

MI_KERNEL(void, quantize_rows_impl,
          (const float* x, int64_t x_stride, int64_t rows, int64_t cols, void* q, int64_t q_stride, StoredScale stored))

namespace mi::kernels {

void quantize_rows(const float* x, int64_t x_stride, int64_t rows, int64_t cols, void* q, int64_t q_stride,
                   const hw::CpuFeatures& cpu, StoredScale stored) {
  MI_DCHECK(rows <= 1 || q_stride >= q8_row_bytes(cols), "q8 rows of {} columns, {} bytes apart", cols, q_stride);
  MI_PICK(quantize_rows_impl, cpu)(x, x_stride, rows, cols, q, q_stride, stored);
}

void quantize_run(const float* x, int64_t x_stride, int64_t rows, int64_t cols, void* q, int64_t q_stride,
                  hw::ThreadPool& pool, const hw::CpuFeatures& cpu, StoredScale stored) {
  run_rows(pool, rows, cols, [&](int64_t begin, int64_t end, int) {
    quantize_rows(row_at(x, x_stride, begin), x_stride, end - begin, cols,
                  row_at(static_cast<char*>(q), q_stride, begin), q_stride, cpu, stored);
  });
}

void dequantize_row(const void* q, int64_t cols, float* out) {
  const int8_t* values = static_cast<const int8_t*>(q);
  float scale;
  std::memcpy(&scale, values + q8_scale_offset(cols), sizeof scale);
  for (int64_t j = 0; j < cols; ++j) out[j] = float(values[j]) * scale;
}

}  // namespace mi::kernels
