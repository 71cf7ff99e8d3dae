#include <immintrin.h>

#include "kernels/probe/args.h"

namespace mi::kernels {

int64_t probe_read_avx512(const ProbeWork& w) {
  const char* p = static_cast<const char*>(w.data);
  __m512i s[4];
  for (__m512i& v : s) v = _mm512_setzero_si512();
  for (int64_t i = 0; i < w.bytes; i += 256) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) s[j] = _mm512_add_epi64(s[j], _mm512_load_si512(p + i + 64 * j));
  }
  return _mm512_reduce_add_epi64(_mm512_add_epi64(_mm512_add_epi64(s[0], s[1]), _mm512_add_epi64(s[2], s[3])));
}

}  // namespace mi::kernels
