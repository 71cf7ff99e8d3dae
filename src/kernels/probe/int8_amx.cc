#include "kernels/probe/amx_products.h"

namespace mi::kernels {

// 4 * 16 * 16 * 64 multiply-adds a round.
int64_t probe_int8_amx(const ProbeWork& w) {
  alignas(64) int8_t ones[16 * 64];
  memset(ones, 1, sizeof ones);
  return MI_ISA::count_products<MI_ISA::AmxI8, int32_t>(ones, w.loops);
}

}  // namespace mi::kernels
