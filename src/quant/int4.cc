#include "quant/int4.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "tensor/dtype.h"
#include "tensor/int4.h"

namespace mi::quant {
namespace {

constexpr int64_t kLanes = 16;  // of independent sums, so that the loop vectorizes without reassociation
constexpr int64_t kLargest = 128;

float rounded(float w, float inv) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
  const float v = std::min(std::max(w * inv, -8.0f), 7.0f);
  return (v + kMagic) - kMagic;
}

// Sum of (q * scale - w)^2; n is a multiple of kLanes.
template <bool kWeighted>
float squared_error(const float* w, const float* importance, int64_t n, float scale) {
  const float inv = 1.0f / scale;
  float sum[kLanes] = {};
  for (int64_t i = 0; i < n; i += kLanes)
    for (int64_t j = 0; j < kLanes; ++j) {
      const float d = rounded(w[i + j], inv) * scale - w[i + j];
      sum[j] += kWeighted ? importance[i + j] * (d * d) : d * d;
    }
  float total = 0;
  for (float s : sum) total += s;
  return total;
}

float best_scale(const float* w, const float* importance, int64_t n) {
  float block[kLargest] = {}, weight[kLargest] = {};
  float top = 0;
  for (int64_t i = 0; i < n; ++i) {
    block[i] = w[i];
    if (importance) weight[i] = importance[i];
    if (std::fabs(w[i]) > std::fabs(top)) top = w[i];
  }
  const int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
  float best = 0, best_error = INFINITY;
  for (float clip : kInt4Clips) {
    const float scale = to_f32(to_bf16(-top / 8 * clip));
    if (!std::isfinite(1.0f / scale) || !std::isfinite(scale)) continue;
    const float error = importance ? squared_error<true>(block, weight, padded, scale) : squared_error<false>(block, weight, padded, scale);
    if (error < best_error) best = scale, best_error = error;
  }
  return best;
}

}  // namespace

void quantize_rows_int4(const float* w, int64_t n, int64_t k, int64_t group, int8_t* q, float* scale,
                        const float* importance) {
  MI_CHECK(int4_group_ok(group), "group {}", group);
  const int64_t groups = int4_groups(k, group);
  for (int64_t r = 0; r < n; ++r)
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = r * k + g * group, count = std::min(group, k - g * group);
      const float s = best_scale(w + begin, importance ? importance + g * group : nullptr, count), inv = s != 0 ? 1.0f / s : 0.0f;
      scale[r * groups + g] = s;
      for (int64_t i = 0; i < count; ++i) q[begin + i] = int8_t(rounded(w[begin + i], inv));
    }
}

}  // namespace mi::quant
