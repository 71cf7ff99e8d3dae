#include <immintrin.h>
#include <string.h>

#include "kernels/probe/args.h"

namespace mi::kernels {

// Without VNNI: multiply to 16-bit pairs, widen to 32 bits, add.
int64_t probe_int8_avx2(const ProbeWork& w) {
  const __m256i pairs_to_sums = _mm256_set1_epi16(1);
  __m256i sum[8], x = _mm256_set1_epi8(1), y = x;
  for (__m256i& s : sum) s = _mm256_setzero_si256();
  for (int64_t i = 0; i < w.loops; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      __asm__ volatile("" : "+x"(x));  // the chains have equal operands: without it their products are computed once
      sum[j] = _mm256_add_epi32(sum[j], _mm256_madd_epi16(_mm256_maddubs_epi16(x, y), pairs_to_sums));
    }
  }
  int32_t lanes[8 * 8];
  memcpy(lanes, sum, sizeof lanes);
  int64_t total = 0;
  for (int32_t v : lanes) total += v;
  return total;
}

}  // namespace mi::kernels
