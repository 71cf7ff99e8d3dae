#pragma once
// Products that run on a slower kernel than they could: one that was left out of the register, or none but the reference
// on this CPU. They belong to a machine, not to an engine: build and serve look at their own.

#include <cstdint>
#include <string>
#include <vector>

#include "artifact/types.h"
#include "base/result.h"
#include "hw/cpu.h"

namespace mi::compiler {

struct KernelFallbacks {
  static constexpr int64_t kPromptTokens = 512;
  std::vector<artifact::Fallback> list;  // one for the same product of several layers
  // Of all of them, estimated by measuring both kernels on their shapes: what a prompt of kPromptTokens in one step and a
  // step of one token take longer. 0: there is nothing to compare with.
  double prompt_seconds = 0, token_seconds = 0;
};

// Measures only where there is something to tell: about 0.1 s for each shape.
KernelFallbacks find_kernel_fallbacks(const artifact::Manifest& m, const hw::CpuFeatures& cpu = hw::cpu());

// "3 operations outside the fast path: 2 in float, 1 on a slower kernel ...", or "none".
std::string fallbacks_line(size_t floats, const KernelFallbacks& kernels);

// Refuses an MI_WITHOUT_KERNEL that names no kernel.
Status check_left_out_kernels();

}  // namespace mi::compiler
