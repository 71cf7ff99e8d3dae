#include "kernels/sample/sample.h"

#include "kernels/dispatch.h"

MI_KERNEL(float, max_of_row_impl, (const float* row, int64_t n))
MI_KERNEL(void, weigh_row_impl, (const float* row, int64_t n, double max, double scale, double* weights, double* sums))

namespace mi::kernels {

float max_of_row(const float* row, int64_t n, const hw::CpuFeatures& cpu) {
  return MI_PICK(max_of_row_impl, cpu)(row, n);
}

void weigh_row(const float* row, int64_t n, double max, double scale, double* weights, double* sums,
               const hw::CpuFeatures& cpu) {
  MI_PICK(weigh_row_impl, cpu)(row, n, max, scale, weights, sums);
}

}  // namespace mi::kernels
