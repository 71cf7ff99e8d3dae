// The probe on plain x86-64, in the form of the other families' scalar kernels.

#include "kernels/probe/args.h"
#include "kernels/simd.h"

namespace mi::kernels {
using namespace MI_ISA;

int64_t probe_read_scalar(const ProbeWork& w) {
  const uint64_t* p = static_cast<const uint64_t*>(w.data);
  uint64_t s[4] = {};
  for (int64_t i = 0; i < w.bytes / 8; i += 4)
    for (int j = 0; j < 4; ++j) s[j] += p[i + j];
  return int64_t(s[0] + s[1] + s[2] + s[3]);
}

int64_t probe_int8_scalar(const ProbeWork& w) {
  int32_t sum[16] = {}, x = 1;
  int8_t y[16];
  memset(y, 1, sizeof y);
  for (int64_t i = 0; i < w.loops; ++i) {
    __asm__ volatile("" : "+r"(x) : "r"(y) : "memory");
    for (int j = 0; j < 16; ++j) sum[j] += x * int32_t(y[j]);
  }
  int64_t total = 0;
  for (int32_t v : sum) total += v;
  return total;
}

int64_t probe_f32_scalar(const ProbeWork& w) {
  V16 sum = v_zero(), x = v_set(1), y = x;
  for (int64_t i = 0; i < w.loops; ++i) {
    sum = v_fma(x, y, sum);
    __asm__ volatile("" : "+m"(x), "+m"(y));
  }
  int64_t total = 0;
  for (int j = 0; j < 16; ++j) total += int64_t(sum[j]);
  return total;
}

}  // namespace mi::kernels
