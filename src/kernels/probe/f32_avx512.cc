#include <immintrin.h>
#include <string.h>

#include "kernels/probe/args.h"

namespace mi::kernels {

int64_t probe_f32_avx512(const ProbeWork& w) {
  __m512 sum[12], x = _mm512_set1_ps(1), y = x;
  for (__m512& s : sum) s = _mm512_setzero_ps();
  for (int64_t i = 0; i < w.loops; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) sum[j] = _mm512_fmadd_ps(x, y, sum[j]);
    __asm__ volatile("" : "+v"(x), "+v"(y));
  }
  float lanes[12 * 16];
  memcpy(lanes, sum, sizeof lanes);
  int64_t total = 0;
  for (float v : lanes) total += int64_t(v);
  return total;
}

}  // namespace mi::kernels
