// One row of rms norm; compiled per ISA.

#include "kernels/simd.h"

namespace mi::kernels::MI_ISA {

// x, y: [groups * n]; w: [n]; y may be x.
void rms_norm_row(const float* x, const float* w, float* y, int64_t groups, int64_t n, float eps, bool plus_one) {
  const V16 one = v_set(1.0f);
  for (int64_t g = 0; g < groups; ++g, x += n, y += n) {
    V16 a[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
    int64_t j = 0;
    for (; j + 64 <= n; j += 64)
      for (int c = 0; c < 4; ++c) {
        const V16 v = v_load(x + j + 16 * c);
        a[c] = v_fma(v, v, a[c]);
      }
    for (int c = 0; j < n; j += 16, ++c) {
      const V16 v = n - j >= 16 ? v_load(x + j) : v_load_n(x + j, n - j);
      a[c] = v_fma(v, v, a[c]);
    }
    const float sum = v_sum((a[0] + a[1]) + (a[2] + a[3]));
    const V16 r = v_set(1.0f) / v_sqrt(v_set(sum / float(n) + eps));
    for (j = 0; j + 16 <= n; j += 16) {
      const V16 wv = plus_one ? one + v_load(w + j) : v_load(w + j);
      v_store(y + j, (v_load(x + j) * r) * wv);
    }
    if (j < n) {
      V16 wv = v_load_n(w + j, n - j);
      if (plus_one) wv = one + wv;
      v_store_n(y + j, (v_load_n(x + j, n - j) * r) * wv, n - j);
    }
  }
}

}  // namespace mi::kernels::MI_ISA
