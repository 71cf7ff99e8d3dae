#include "quant/compare.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"

namespace mi::quant {
namespace {

std::vector<float> logits_of(const Sequences& one, PieceEngine& head, std::span<const float> rows) {
  std::vector<float> out(one[0].size() * size_t(head.vocab()));
  head.run_head(one, rows, [&](int64_t first, std::span<const float> logits) {
    std::copy(logits.begin(), logits.end(), out.begin() + first * head.vocab());
  });
  return out;
}

}  // namespace

double log_sum_exp(const float* v, int64_t n) {
  const double m = *std::max_element(v, v + n);
  double s = 0;
  for (int64_t i = 0; i < n; ++i) s += std::exp(v[i] - m);
  return m + std::log(s);
}

double kl_divergence(const float* a, const float* b, int64_t n) {
  const double za = log_sum_exp(a, n), zb = log_sum_exp(b, n);
  double kl = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double la = a[i] - za;
    kl += std::exp(la) * (la - (b[i] - zb));
  }
  return std::max(kl, 0.0);
}

double error_of_mean(std::span<const double> x, std::span<const int64_t> n) {
  MI_CHECK_EQ(x.size(), n.size());
  const double all = double(std::accumulate(n.begin(), n.end(), int64_t(0)));
  if (x.size() < 2 || all <= 0) return 0;
  const double mean = std::accumulate(x.begin(), x.end(), 0.0) / all;
  double squares = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double d = x[i] - mean * double(n[i]);
    squares += d * d;
  }
  return std::sqrt(squares * double(x.size()) / double(x.size() - 1)) / all;
}

LayerDeviation deviation(int32_t layer, std::span<const float> x, std::span<const float> y) {
  double err2 = 0, ref2 = 0, dot = 0, oth2 = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double d = double(y[i]) - x[i];
    err2 += d * d;
    ref2 += double(x[i]) * x[i];
    oth2 += double(y[i]) * y[i];
    dot += double(x[i]) * y[i];
  }
  return {layer, ref2 > 0 ? std::sqrt(err2 / ref2) : 0, ref2 > 0 && oth2 > 0 ? dot / std::sqrt(ref2 * oth2) : 1, 0};
}

Predictions compare_predictions(const Sequences& s, PieceEngine& head, std::span<const float> residual,
                                PieceEngine& rounded_head, std::span<const float> rounded_residual) {
  const int64_t vocab = head.vocab(), hidden = head.hidden();
  Predictions p;
  double agree = 0;
  std::vector<double> grown;  // by how much a sequence's log probability fell
  std::vector<int64_t> scored;
  for (const std::vector<int32_t>& ids : s) {
    const size_t n = ids.size(), from = size_t(p.tokens * hidden), rows = n * size_t(hidden);
    const std::vector<float> a = logits_of({ids}, head, residual.subspan(from, rows));
    const std::vector<float> b = logits_of({ids}, rounded_head, rounded_residual.subspan(from, rows));
    const double before = p.rounded_nll - p.nll;
    for (size_t t = 0; t < n; ++t) {
      const float *x = a.data() + t * size_t(vocab), *y = b.data() + t * size_t(vocab);
      const double kl = kl_divergence(x, y, vocab);
      p.mean_kl += kl;
      p.max_kl = std::max(p.max_kl, kl);
      agree += std::max_element(x, x + vocab) - x == std::max_element(y, y + vocab) - y;
      if (t + 1 == n) continue;
      p.nll += log_sum_exp(x, vocab) - x[ids[t + 1]];
      p.rounded_nll += log_sum_exp(y, vocab) - y[ids[t + 1]];
      ++p.scored;
    }
    p.tokens += int64_t(n);
    grown.push_back(p.rounded_nll - p.nll - before);
    scored.push_back(int64_t(n) - 1);
  }
  if (p.tokens > 0) {
    p.mean_kl /= double(p.tokens);
    p.top1_agreement = agree / double(p.tokens);
  }
  if (p.scored > 0) {
    p.nll /= double(p.scored);
    p.rounded_nll /= double(p.scored);
    p.nll_error = error_of_mean(grown, scored);
  }
  return p;
}

}  // namespace mi::quant
