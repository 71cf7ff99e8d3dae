#include "quant/int8.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace mi::quant {
namespace {

constexpr int64_t kLanes = 16;  // of independent sums, so that the loop vectorizes without reassociation

// By bits, which order as the magnitudes do and need no order of evaluation: of numbers that are finite.
float max_abs(const float* v, int64_t n) {
  int32_t m = 0;
  for (int64_t i = 0; i < n; ++i) m = std::max(m, std::bit_cast<int32_t>(v[i]) & 0x7fffffff);
  return std::bit_cast<float>(m);
}

}  // namespace

void quantize_rows(const float* w, int64_t n, int64_t k, WeightScheme scheme, int8_t* q, float* scale) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
  const float whole = scheme == WeightScheme::kPerTensor ? max_abs(w, n * k) : 0;
  for (int64_t r = 0; r < n; ++r) {
    const float* row = w + r * k;
    const float amax = scheme == WeightScheme::kPerTensor ? whole : max_abs(row, k);
    scale[r] = amax / 127.0f;
    // A subnormal amax can make the scale 0 or its inverse infinite: such a row is zero at int8.
    const float inverse = 1.0f / scale[r], inv = scale[r] > 0 && std::isfinite(inverse) ? inverse : 0.0f;
    for (int64_t i = 0; i < k; ++i)
      q[r * k + i] = int8_t((std::min(std::max(row[i] * inv, -127.0f), 127.0f) + kMagic) - kMagic);
  }
}

double WeightError::relative() const { return ref2 > 0 ? std::sqrt(err2 / ref2) : 0; }

void add_error(const float* w, const int8_t* q, const float* scale, int64_t n, int64_t k, int64_t group, WeightError* e) {
  double err2[kLanes] = {}, ref2[kLanes] = {};
  for (int64_t r = 0; r < n; ++r)
    for (int64_t begin = 0; begin < k; begin += group, ++scale) {
      const float* v = w + r * k + begin;
      const int8_t* whole = q + r * k + begin;
      const double step = *scale;
      const auto add = [&](int64_t i, int64_t lane) {
        const double x = v[i], d = double(whole[i]) * step - x;
        err2[lane] += d * d;
        ref2[lane] += x * x;
      };
      const int64_t count = std::min(group, k - begin), full = count / kLanes * kLanes;
      for (int64_t i = 0; i < full; i += kLanes)
        for (int64_t lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
      for (int64_t i = full; i < count; ++i) add(i, i - full);
    }
  for (double x : err2) e->err2 += x;
  for (double x : ref2) e->ref2 += x;
}

}  // namespace mi::quant
