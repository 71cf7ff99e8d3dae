#include "base/check.h"
#include "kernels/gemm/gemm.h"

namespace mi::kernels {

#define MI_GEMM(name, format, needs, condition) void name(const GemmArgs& a, const GemmRange& r, void* scratch);
#include "kernels/gemm/kernels.inc"
#undef MI_GEMM

namespace {
const GemmKernel kKernels[] = {
#define MI_GEMM(name, format, needs, condition) \
  {#name, GemmFormat::format, needs,            \
   [](const hw::CpuFeatures& f) -> bool {       \
     static_cast<void>(f);                      \
     return condition;                          \
   },                                           \
   name},
#include "kernels/gemm/kernels.inc"
#undef MI_GEMM
};
}  // namespace

std::span<const GemmKernel> gemm_kernels() { return kKernels; }

const GemmKernel& select_gemm(GemmFormat format, const hw::CpuFeatures& cpu) {
  for (const GemmKernel& k : kKernels)
    if (k.format == format && k.runs_on(cpu)) return k;
  MI_CHECK(false, "no kernel for format {}", int(format));
}

const GemmKernel& reference_gemm(GemmFormat format) { return select_gemm(format, hw::CpuFeatures{}); }

const char* gemm_format_name(GemmFormat f) {
  return f == GemmFormat::kI8     ? "int8"
         : f == GemmFormat::kI4   ? "int4"
         : f == GemmFormat::kBF16 ? "bf16"
                                  : "f32";
}

}  // namespace mi::kernels
