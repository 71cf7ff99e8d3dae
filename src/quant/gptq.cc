#include "quant/gptq.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "quant/axpy.h"
#include "tensor/dtype.h"

namespace mi::quant {
namespace {

constexpr int64_t kRows = 16;  // rounded together: one pass over U serves all
constexpr int kPasses = 3;     // over the numbers of a row; the first changes most

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

// a x = b for a symmetric positive definite a [m, m], in place; false: it is not.
bool solve(std::vector<double>& a, std::vector<double>& b) {
  const size_t m = b.size();
  for (size_t j = 0; j < m; ++j) {
    for (size_t i = j; i < m; ++i) {
      double v = a[i * m + j];
      for (size_t t = 0; t < j; ++t) v -= a[i * m + t] * a[j * m + t];
      if (i == j && !(v > 0)) return false;
      a[i * m + j] = i == j ? std::sqrt(v) : v / a[j * m + j];
    }
  }
  for (size_t i = 0; i < m; ++i) {
    for (size_t t = 0; t < i; ++t) b[i] -= a[i * m + t] * b[t];
    b[i] /= a[i * m + i];
  }
  for (size_t i = m; i-- > 0;) {
    for (size_t t = i + 1; t < m; ++t) b[i] -= a[t * m + i] * b[t];
    b[i] /= a[i * m + i];
  }
  return true;
}

}  // namespace

// Some rows of a matrix while they are rounded.
struct ErrorSpread::Rows {
  const float* w;
  int64_t n, k, group, groups;
  const float* scale;
  float low, high;
  int8_t* q;
  std::vector<float> gradient;  // H (w - q scale), by row

  float step(int64_t r, int64_t column) const { return scale[r * groups + column / group]; }
  float error(int64_t r, int64_t j) const { return w[r * k + j] - float(q[r * k + j]) * step(r, j); }
  float whole(float v, float s) const { return s != 0 ? std::clamp(std::nearbyint(v / s), low, high) : 0.0f; }
  double loss(int64_t r) const {
    double sum = 0;
    for (int64_t j = 0; j < k; ++j) sum += double(error(r, j)) * gradient[size_t(r * k + j)];
    return sum;
  }
};

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
  for (int64_t i = 0; i < k; ++i) gram[size_t(i * k + i)] += float(add);
  h_ = std::move(gram);
  factor(a, k);
  invert(a, k);
  u_.assign(size_t(k * k), 0.0f);
  for (int64_t i = 0; i < k; ++i)
    for (int64_t j = i; j < k; ++j) u_[size_t(i * k + j)] = float(a[size_t((k - 1 - j) * k + k - 1 - i)]);
}

void ErrorSpread::spread(Rows& rows) const {
  std::vector<float> left(size_t(rows.n * k_));
  for (int64_t r = 0; r < rows.n; ++r)
    for (int64_t j = 0; j < k_; ++j) left[size_t(r * k_ + j)] = rows.w[r * k_ + order_[size_t(j)]];
  for (int64_t j = 0; j < k_; ++j) {
    const float* u = u_.data() + j * k_;
    const int64_t column = order_[size_t(j)];
    for (int64_t r = 0; r < rows.n; ++r) {
      float* v = left.data() + r * k_;
      const float s = rows.step(r, column), rounded = rows.whole(v[j], s);
      rows.q[r * k_ + column] = int8_t(rounded);
      const float error = (v[j] - rounded * s) / u[j];
      if (error != 0) subtract_scaled(v + j + 1, u + j + 1, error, k_ - j - 1);
    }
  }
}

void ErrorSpread::gradient(Rows& rows) const {
  rows.gradient.assign(size_t(rows.n * k_), 0.0f);
  for (int64_t j = 0; j < k_; ++j)
    for (int64_t r = 0; r < rows.n; ++r)
      if (const float e = rows.error(r, j); e != 0)
        subtract_scaled(rows.gradient.data() + r * k_, h_.data() + j * k_, -e, k_);
}

// One number after the other to the whole one of least loss, the others as they are: no step makes it more.
void ErrorSpread::settle(Rows& rows) const {
  for (int64_t r = 0; r < rows.n; ++r) {
    float* g = rows.gradient.data() + r * k_;
    int8_t* q = rows.q + r * k_;
    for (int pass = 0; pass < kPasses; ++pass) {
      bool changed = false;
      for (const int32_t j : order_) {
        const float s = rows.step(r, j);
        if (s == 0) continue;
        const float v = rows.whole(float(q[j]) * s + g[j] / h_[size_t(j * k_ + j)], s), step = (v - float(q[j])) * s;
        if (step == 0) continue;
        q[j] = int8_t(v);
        subtract_scaled(g, h_.data() + j * k_, step, k_);
        changed = true;
      }
      if (!changed) break;
    }
  }
}

// The scales of least loss for the whole numbers as they are: for group sums a_g = q over the columns of g, the change d
// of the scales solves (a_g^T H a_h) d = a_g^T gradient. Rows that it does not help stay as they are.
void ErrorSpread::fit_scales(Rows& rows, float* scale) const {
  const int64_t groups = rows.groups, n = rows.n;
  std::vector<double> products(size_t(n * groups * groups)), right(size_t(n * groups));
  std::vector<float> h(size_t(n * k_));
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = g * rows.group, end = std::min(k_, begin + rows.group);
    std::fill(h.begin(), h.end(), 0.0f);
    for (int64_t j = begin; j < end; ++j)
      for (int64_t r = 0; r < n; ++r)
        if (const float q = rows.q[r * k_ + j]; q != 0) subtract_scaled(h.data() + r * k_, h_.data() + j * k_, -q, k_);
    for (int64_t r = 0; r < n; ++r) {
      const int8_t* q = rows.q + r * k_;
      for (int64_t j = begin; j < end; ++j) right[size_t(r * groups + g)] += double(q[j]) * rows.gradient[size_t(r * k_ + j)];
      for (int64_t j = 0; j < k_; ++j)
        products[size_t((r * groups + g) * groups + j / rows.group)] += double(q[j]) * h[size_t(r * k_ + j)];
    }
  }
  const std::vector<float> before(scale, scale + n * groups);
  std::vector<double> losses;
  for (int64_t r = 0; r < n; ++r) {
    losses.push_back(rows.loss(r));
    std::vector<int64_t> used;  // groups of zeros alone have no scale to fit
    for (int64_t g = 0; g < groups; ++g)
      if (products[size_t((r * groups + g) * groups + g)] > 0) used.push_back(g);
    std::vector<double> a, b;
    for (int64_t g : used) {
      b.push_back(right[size_t(r * groups + g)]);
      for (int64_t other : used) a.push_back(products[size_t((r * groups + g) * groups + other)]);
    }
    if (!solve(a, b)) continue;
    for (size_t i = 0; i < used.size(); ++i) {
      float& s = scale[r * groups + used[i]];
      const float fitted = to_f32(to_bf16(float(s + b[i])));
      if (std::isfinite(1 / fitted) && fitted / s > 0.5f && fitted / s < 2) s = fitted;
    }
  }
  gradient(rows);
  bool restored = false;
  for (int64_t r = 0; r < n; ++r)
    if (!(rows.loss(r) <= losses[size_t(r)])) {
      std::copy_n(before.begin() + r * groups, groups, scale + r * groups);
      restored = true;
    }
  if (restored) gradient(rows);
}

void ErrorSpread::round(const float* w, int64_t n, const float* scale, float* fitted, int64_t group, int low, int high,
                        int8_t* q) const {
  const int64_t groups = (k_ + group - 1) / group;
  for (int64_t r = 0; r < n; r += kRows) {
    Rows rows{w + r * k_, std::min(kRows, n - r), k_, group, groups, scale + r * groups, float(low), float(high), q + r * k_, {}};
    spread(rows);
    gradient(rows);
    settle(rows);
    if (!fitted) continue;
    fit_scales(rows, fitted + r * groups);
    settle(rows);
  }
}

void ErrorSpread::round_rows(const float* w, int64_t n, const float* scale, int64_t group, int low, int high, int8_t* q) const {
  round(w, n, scale, nullptr, group, low, high, q);
}

void ErrorSpread::round_groups(const float* w, int64_t n, float* scale, int64_t group, int low, int high, int8_t* q) const {
  round(w, n, scale, scale, group, low, high, q);
}

std::vector<float> ErrorSpread::diagonal() const {
  std::vector<float> d;
  for (int64_t i = 0; i < k_; ++i) d.push_back(h_[size_t(i * k_ + i)]);
  return d;
}

}  // namespace mi::quant
