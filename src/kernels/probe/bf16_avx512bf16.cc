#include <immintrin.h>
#include <string.h>

#include "kernels/probe/args.h"

namespace mi::kernels {

int64_t probe_bf16_avx512bf16(const ProbeWork& w) {
  constexpr int64_t kCounted = kProbeMaxLoops / 2;  // two products a round: a float counts so many of them
  int64_t total = 0;
  __m512i x = _mm512_set1_epi16(0x3f80), y = x;  // 1
  for (int64_t from = 0; from < w.loops; from += kCounted) {
    const int64_t loops = w.loops - from < kCounted ? w.loops - from : kCounted;
    __m512 sum[12];
    for (__m512& s : sum) s = _mm512_setzero_ps();
    for (int64_t i = 0; i < loops; ++i) {
#pragma GCC unroll 12
      for (int j = 0; j < 12; ++j) sum[j] = _mm512_dpbf16_ps(sum[j], (__m512bh)x, (__m512bh)y);
      __asm__ volatile("" : "+v"(x), "+v"(y));
    }
    float lanes[12 * 16];
    memcpy(lanes, sum, sizeof lanes);
    for (float v : lanes) total += int64_t(v);
  }
  return total;
}

}  // namespace mi::kernels
