#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "base/check.h"
#include "base/json.h"
#include "kernels/gemm/gemm.h"

namespace mi::kernels {

#define MI_GEMM(name, format, needs, condition) void name(const GemmArgs& a, const GemmRange& r, void* scratch);
#include "kernels/gemm/kernels.inc"
#undef MI_GEMM

namespace {
const GemmKernel kGemmKernels[] = {
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

std::span<const GemmKernel> gemm_kernels() { return kGemmKernels; }

namespace {

std::vector<std::string> names_in(const std::string& list) {
  std::vector<std::string> names;
  std::istringstream in(list);
  for (std::string name; std::getline(in, name, ',');)
    if (!name.empty()) names.push_back(name);
  return names;
}

}  // namespace

bool gemm_left_out(const GemmKernel& k) {
  static const std::vector<std::string> names = [] {
    const char* list = std::getenv("MI_WITHOUT_KERNEL");
    return names_in(list ? list : "");
  }();
  return *k.needs && std::find(names.begin(), names.end(), k.name) != names.end();
}

Status check_left_out(const std::string& list) {
  std::vector<std::string> known;
  for (const GemmKernel& k : kGemmKernels)
    if (*k.needs) known.emplace_back(k.name);
  for (const std::string& name : names_in(list)) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    const std::string near = nearest_name(name, known);
    return fail(ErrorCode::kUsage, "MI_WITHOUT_KERNEL={}: no kernel that can be left out{}", name,
                near.empty() ? "" : fmt::format(" (did you mean {}?)", near));
  }
  return {};
}

const GemmKernel& select_gemm(GemmFormat format, const hw::CpuFeatures& cpu) {
  for (const GemmKernel& k : kGemmKernels)
    if (k.format == format && k.runs_on(cpu) && !gemm_left_out(k)) return k;
  MI_CHECK(false, "no kernel for format {}", int(format));
}

std::optional<GemmFallback> gemm_fallback(GemmFormat format, const hw::CpuFeatures& cpu) {
  GemmFallback f{&select_gemm(format, cpu), nullptr};
  bool others = false;
  for (const GemmKernel& k : kGemmKernels) {
    if (k.format != format) continue;
    if (&k == f.chosen) break;
    others = true;
    if (!f.better && k.runs_on(cpu)) f.better = &k;
  }
  if (!f.better && (*f.chosen->needs || !others)) return {};
  return f;
}

const GemmKernel& reference_gemm(GemmFormat format) { return select_gemm(format, hw::CpuFeatures{}); }

const char* gemm_format_name(GemmFormat f) {
  return f == GemmFormat::kI8     ? "int8"
         : f == GemmFormat::kI4   ? "int4"
         : f == GemmFormat::kBF16 ? "bf16"
                                  : "f32";
}

}  // namespace mi::kernels
