#include <immintrin.h>
#include <string.h>

#include "kernels/probe/args.h"

namespace mi::kernels {

int64_t probe_int8_avxvnni(const ProbeWork& w) {
  __m256i sum[12], x = _mm256_set1_epi8(1), y = x;
  for (__m256i& s : sum) s = _mm256_setzero_si256();
  for (int64_t i = 0; i < w.loops; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) sum[j] = _mm256_dpbusd_avx_epi32(sum[j], x, y);
    __asm__ volatile("" : "+x"(x), "+x"(y));
  }
  int32_t lanes[12 * 8];
  memcpy(lanes, sum, sizeof lanes);
  int64_t total = 0;
  for (int32_t v : lanes) total += v;
  return total;
}

}  // namespace mi::kernels
