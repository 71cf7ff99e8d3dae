#include <immintrin.h>

#include "kernels/probe/args.h"

namespace mi::kernels {

int64_t probe_int8_avx512vnni(const ProbeWork& w) {
  __m512i sum[12], x = _mm512_set1_epi8(1), y = x;
  for (__m512i& s : sum) s = _mm512_setzero_si512();
  for (int64_t i = 0; i < w.loops; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) sum[j] = _mm512_dpbusd_epi32(sum[j], x, y);
    __asm__ volatile("" : "+v"(x), "+v"(y));
  }
  int64_t total = 0;
  for (const __m512i& s : sum)
    total += _mm512_reduce_add_epi64(_mm512_add_epi64(_mm512_cvtepi32_epi64(_mm512_castsi512_si256(s)),
                                                      _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(s, 1))));
  return total;
}

}  // namespace mi::kernels
