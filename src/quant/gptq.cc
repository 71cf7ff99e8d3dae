#include "quant/gptq.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "quant/axpy.h"

namespace mi::quant {
namespace {

constexpr int64_t kRows = 16;  // rounded together: one pass over U serves all

// a [k, k], its upper half positive definite -> upper triangular R with a = R^T R, in place.
void factor(std::vector<double>& a, int64_t k) {
  for (int64_t j = 0; j < k; ++j) {
    double* row = a.data() + j * k;
    const double d = std::sqrt(std::max(row[j], 1e-300));
    for (int64_t i = j; i < k; ++i) row[i] /= d;
    for (int64_t i = j + 1; i < k; ++i) subtract_scaled(a.data() + i * k + i, row + i, row[i], k - i);
  }
}

// R upper triangular -> R^-1, in place.
void invert(std::vector<double>& r, int64_t k) {
  std::vector<double> sum(static_cast<size_t>(k));
  for (int64_t i = k - 1; i >= 0; --i) {
    double* row = r.data() + i * k;
    std::fill(sum.begin(), sum.end(), 0.0);
    for (int64_t m = i + 1; m < k; ++m) subtract_scaled(sum.data() + m, r.data() + m * k + m, row[m], k - m);
    const double d = 1.0 / row[i];
    row[i] = d;
    for (int64_t j = i + 1; j < k; ++j) row[j] = sum[size_t(j)] * d;
  }
}

}  // namespace

ErrorSpread::ErrorSpread(std::vector<float> gram, int64_t k, double damping) : k_(k), order_(size_t(k)) {
  MI_CHECK_EQ(int64_t(gram.size()), k * k);
  double mean = 0;
  for (int64_t i = 0; i < k; ++i) mean += gram[size_t(i * k + i)];
  mean /= double(k);
  const double add = mean > 0 ? damping * mean : 1;
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
    return gram[size_t(a * k + a)] > gram[size_t(b * k + b)];
  });
  // H in reversed order = R^T R; then U = R^-1 turned round again: U_ij = (R^-1)_{k-1-j, k-1-i}.
  std::vector<double> a(size_t(k * k));
  for (int64_t i = 0; i < k; ++i)
    for (int64_t j = 0; j < k; ++j)
      a[size_t((k - 1 - i) * k + k - 1 - j)] =
          double(gram[size_t(order_[size_t(i)] * k + order_[size_t(j)])]) + (i == j ? add : 0);
  gram = {};
  factor(a, k);
  invert(a, k);
  u_.assign(size_t(k * k), 0.0f);
  for (int64_t i = 0; i < k; ++i)
    for (int64_t j = i; j < k; ++j) u_[size_t(i * k + j)] = float(a[size_t((k - 1 - j) * k + k - 1 - i)]);
}

void ErrorSpread::round_rows(const float* w, int64_t n, const float* scale, int64_t group, int low, int high,
                             int8_t* q) const {
  const int64_t groups = (k_ + group - 1) / group;
  std::vector<float> left(size_t(kRows * k_));
  for (int64_t r0 = 0; r0 < n; r0 += kRows) {
    const int64_t rows = std::min(kRows, n - r0);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t j = 0; j < k_; ++j) left[size_t(r * k_ + j)] = w[(r0 + r) * k_ + order_[size_t(j)]];
    for (int64_t j = 0; j < k_; ++j) {
      const float* u = u_.data() + j * k_;
      const int64_t column = order_[size_t(j)];
      for (int64_t r = 0; r < rows; ++r) {
        float* v = left.data() + r * k_;
        const float s = scale[(r0 + r) * groups + column / group];
        const float rounded = s != 0 ? std::clamp(std::nearbyint(v[j] / s), float(low), float(high)) : 0.0f;
        q[(r0 + r) * k_ + column] = int8_t(rounded);
        const float error = (v[j] - rounded * s) / u[j];
        if (error != 0) subtract_scaled(v + j + 1, u + j + 1, error, k_ - j - 1);
      }
    }
  }
}

}  // namespace mi::quant
