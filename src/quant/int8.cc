#include "quant/int8.h"

#include <algorithm>
#include <cmath>

namespace mi::quant {
namespace {
float max_abs(const float* v, int64_t n) {
  float m = 0;
  for (int64_t i = 0; i < n; ++i) m = std::max(m, std::fabs(v[i]));
  return m;
}
}  // namespace

void quantize_rows(const float* w, int64_t n, int64_t k, WeightScheme scheme, int8_t* q, float* scale) {
  const float whole = scheme == WeightScheme::kPerTensor ? max_abs(w, n * k) : 0;
  for (int64_t r = 0; r < n; ++r) {
    const float* row = w + r * k;
    const float amax = scheme == WeightScheme::kPerTensor ? whole : max_abs(row, k);
    scale[r] = amax / 127.0f;
    // A subnormal amax can make the scale 0: such a row is zero at int8.
    const float inv = scale[r] > 0 ? 1.0f / scale[r] : 0.0f;
    for (int64_t i = 0; i < k; ++i)
      q[r * k + i] = std::isfinite(inv) ? int8_t(std::clamp(std::nearbyint(row[i] * inv), -127.0f, 127.0f)) : int8_t(0);
  }
}

double WeightError::relative() const { return ref2 > 0 ? std::sqrt(err2 / ref2) : 0; }

void add_error(const float* w, const int8_t* q, const float* scale, int64_t n, int64_t k, WeightError* e) {
  for (int64_t r = 0; r < n; ++r)
    for (int64_t i = 0; i < k; ++i) {
      const double v = w[r * k + i], d = double(q[r * k + i]) * scale[r] - v;
      e->err2 += d * d;
      e->ref2 += v * v;
    }
}

}  // namespace mi::quant
