#include <immintrin.h>

#include "kernels/probe/args.h"

namespace mi::kernels {

int64_t probe_read_avx2(const ProbeWork& w) {
  const char* p = static_cast<const char*>(w.data);
  __m256i s[8];
  for (__m256i& v : s) v = _mm256_setzero_si256();
  for (int64_t i = 0; i < w.bytes; i += 256) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j)
      s[j] = _mm256_add_epi64(s[j], _mm256_load_si256(reinterpret_cast<const __m256i*>(p + i + 32 * j)));
  }
  for (int j = 1; j < 8; ++j) s[0] = _mm256_add_epi64(s[0], s[j]);
  return int64_t(uint64_t(_mm256_extract_epi64(s[0], 0)) + uint64_t(_mm256_extract_epi64(s[0], 1)) +
                 uint64_t(_mm256_extract_epi64(s[0], 2)) + uint64_t(_mm256_extract_epi64(s[0], 3)));
}

}  // namespace mi::kernels
