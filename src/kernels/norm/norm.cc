#include "kernels/norm/norm.h"

#include "kernels/dispatch.h"
#include "kernels/gemm/gemm.h"
#include "kernels/quantize/quantize.h"
#include "kernels/rows.h"

MI_KERNEL(void, rms_norm_row, (const float* x, const float* w, float* y, int64_t groups, int64_t n, float eps, bool plus_one))

namespace mi::kernels {

void rms_norm_rows(const NormParams& p, const RmsNormArgs& a, int64_t begin, int64_t end, const hw::CpuFeatures& cpu) {
  const auto norm_row = MI_PICK(rms_norm_row, cpu);
  const int64_t n = a.cols / p.groups;
  float* scratch = a.y ? nullptr : static_cast<float*>(thread_scratch(a.cols * 4));
  for (int64_t i = begin; i < end; ++i) {
    float* y = a.y ? row_at(a.y, a.y_stride, i) : scratch;
    norm_row(row_at(a.x, a.x_stride, i), a.weight, y, p.groups, n, p.eps, p.plus_one);
    if (a.q) quantize_rows(y, a.cols * 4, 1, a.cols, static_cast<char*>(a.q) + i * a.q_stride, a.q_stride, cpu);
  }
}

void rms_norm_run(const NormParams& p, const RmsNormArgs& a, hw::ThreadPool& pool, const hw::CpuFeatures& cpu) {
  run_rows(pool, a.rows, a.cols, [&](int64_t begin, int64_t end, int) { rms_norm_rows(p, a, begin, end, cpu); });
}

}  // namespace mi::kernels
