#include "kernels/probe/amx_products.h"

namespace mi::kernels {

// 4 * 16 * 16 * 32 multiply-adds a round. A float counts them: every sum is a multiple of 32.
int64_t probe_bf16_amx(const ProbeWork& w) {
  alignas(64) uint16_t ones[16 * 32];
  for (uint16_t& v : ones) v = 0x3f80;
  return MI_ISA::count_products<MI_ISA::AmxBF16, float>(ones, w.loops);
}

}  // namespace mi::kernels
