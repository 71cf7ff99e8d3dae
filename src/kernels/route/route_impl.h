// Scores of one row of router logits; compiled per ISA.

#include "kernels/simd.h"

namespace mi::kernels::MI_ISA {

void route_softmax(const float* x, int64_t n, float* y) {
  V16 m = v_set(-__builtin_inff());
  for (int64_t j = 0; j < n; j += 16) m = v_max(n - j >= 16 ? v_load(x + j) : v_load_n(x + j, n - j, -__builtin_inff()), m);
  const V16 top = v_set(v_max_lane(m));
  V16 sum = v_zero();
  for (int64_t j = 0; j < n; j += 16) {
    const int64_t c = n - j < 16 ? n - j : 16;
    const V16 e = v_exp(v_load_n(x + j, c, -__builtin_inff()) - top);
    v_store_n(y + j, e, c);
    sum = sum + e;
  }
  const V16 total = v_set(v_sum(sum));
  for (int64_t j = 0; j < n; j += 16) {
    const int64_t c = n - j < 16 ? n - j : 16;
    v_store_n(y + j, v_load_n(y + j, c) / total, c);
  }
}

void route_sigmoid(const float* x, int64_t n, float* y) {
  for (int64_t j = 0; j < n; j += 16) {
    const int64_t c = n - j < 16 ? n - j : 16;
    v_store_n(y + j, v_sigmoid(v_load_n(x + j, c)), c);
  }
}

}  // namespace mi::kernels::MI_ISA
