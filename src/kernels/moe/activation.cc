#include "kernels/moe/activation.h"

#include "kernels/dispatch.h"
#include "kernels/gemm/gemm.h"
#include "kernels/moe/kinds.h"
#include "kernels/quantize/quantize.h"
#include "kernels/rows.h"

MI_KERNEL(void, activation_impl, (const ActArgs& a))

namespace mi::kernels {

static_assert(int(ActKind::kSilu) == kActSilu && int(ActKind::kGelu) == kActGelu &&
              int(ActKind::kGeluTanh) == kActGeluTanh && int(ActKind::kRelu) == kActRelu &&
              int(ActKind::kSwigluOai) == kActSwigluOai);

void activation_rows(const ActivationParams& p, const float* gate, int64_t gate_stride, const float* up,
                     int64_t up_stride, int64_t rows, int64_t cols, float* h, int64_t h_stride,
                     const hw::CpuFeatures& cpu) {
  MI_PICK(activation_impl, cpu)
  ({int(p.kind), p.alpha, p.limit, gate, up, gate_stride, up_stride, rows, cols, h, h_stride, nullptr});
}

void activation_run(const ActivationParams& p, const float* gate, int64_t gate_stride, const float* up,
                    int64_t up_stride, int64_t rows, int64_t cols, float* h, int64_t h_stride, hw::ThreadPool& pool,
                    const hw::CpuFeatures& cpu) {
  run_rows(pool, rows, cols, [&](int64_t begin, int64_t end, int) {
    activation_rows(p, row_at(gate, gate_stride, begin), gate_stride, row_at(up, up_stride, begin), up_stride,
                    end - begin, cols, row_at(h, h_stride, begin), h_stride, cpu);
  });
}

void activation_quantize_run(const ActivationParams& p, const float* gate, int64_t gate_stride, const float* up,
                             int64_t up_stride, int64_t rows, int64_t cols, void* q, int64_t q_stride,
                             hw::ThreadPool& pool, const hw::CpuFeatures& cpu) {
  run_rows(pool, rows, cols, [&](int64_t begin, int64_t end, int) {
    float* h = static_cast<float*>(thread_scratch(cols * 4));
    for (int64_t i = begin; i < end; ++i) {
      activation_rows(p, row_at(gate, gate_stride, i), gate_stride, row_at(up, up_stride, i), up_stride, 1, cols, h,
                      cols * 4, cpu);
      quantize_rows(h, cols * 4, 1, cols, row_at(static_cast<char*>(q), q_stride, i), q_stride, cpu);
    }
  });
}

}  // namespace mi::kernels
