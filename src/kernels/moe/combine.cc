#include "kernels/dispatch.h"
#include "kernels/moe/grouped.h"
#include "kernels/rows.h"

MI_KERNEL(void, combine_impl,
          (const float* weights, const float* y, int64_t y_stride, int64_t k, int64_t cols, const float* residual,
           float* out))

namespace mi::kernels {

void expert_combine(const ExpertCombineArgs& a, hw::ThreadPool& pool, const hw::CpuFeatures& cpu) {
  const auto combine = MI_PICK(combine_impl, cpu);
  run_rows(pool, a.tokens, a.cols * (a.route.k + 1), [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t)
      combine(a.route.weights(t), row_at(a.y, a.y_stride, t * a.route.k), a.y_stride, a.route.k, a.cols,
              a.residual ? row_at(a.residual, a.residual_stride, t) : nullptr, row_at(a.out, a.out_stride, t));
  });
}

}  // namespace mi::kernels
