#include "quant/compare.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

namespace mi::quant {
namespace {

struct Run {
  std::map<int32_t, std::vector<float>> residual;  // by layer
  std::vector<float> logits;
};

Run run_once(exec::Engine& engine, std::span<const int32_t> ids) {
  Run run;
  exec::Tap tap;
  tap.want = [](const artifact::Instr& i, bool input) { return !input && i.layer_output && i.layer >= 0; };
  tap.see = [&](const exec::TapEvent& e) {
    if (e.operand == &e.instr->out[0]) run.residual[e.instr->layer].assign(e.values, e.values + e.rows * e.cols);
  };
  engine.set_tap(&tap);
  std::vector<int32_t> pages(size_t(engine.kv_pages()));
  std::iota(pages.begin(), pages.end(), 0);
  exec::Batch batch;
  batch.chunks.push_back({ids, 0, pages, 0});
  const std::span<const float> logits = engine.run(batch);
  run.logits.assign(logits.begin(), logits.end());
  engine.set_tap(nullptr);
  return run;
}

double log_sum_exp(const float* v, int64_t n) {
  const double m = *std::max_element(v, v + n);
  double s = 0;
  for (int64_t i = 0; i < n; ++i) s += std::exp(v[i] - m);
  return m + std::log(s);
}

}  // namespace

double kl_divergence(const float* a, const float* b, int64_t n) {
  const double za = log_sum_exp(a, n), zb = log_sum_exp(b, n);
  double kl = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double la = a[i] - za;
    kl += std::exp(la) * (la - (b[i] - zb));
  }
  return std::max(kl, 0.0);
}

Comparison compare(exec::Engine& reference, exec::Engine& other, const CalibrationSet& set, int64_t max_tokens) {
  const int64_t vocab = reference.manifest().model.vocab;
  struct Sums {
    double err2 = 0, ref2 = 0, dot = 0, oth2 = 0;
  };
  std::map<int32_t, Sums> sums;
  Comparison c;
  double agree = 0;
  for (const std::vector<int32_t>& ids : set.sequences) {
    if (c.tokens >= max_tokens) break;
    const size_t n = std::min<size_t>(ids.size(), size_t(reference.options().max_tokens_per_step));
    const Run a = run_once(reference, std::span(ids).first(n)), b = run_once(other, std::span(ids).first(n));
    for (const auto& [layer, x] : a.residual) {
      const std::vector<float>& y = b.residual.at(layer);
      Sums& s = sums[layer];
      for (size_t i = 0; i < x.size(); ++i) {
        const double d = double(y[i]) - x[i];
        s.err2 += d * d;
        s.ref2 += double(x[i]) * x[i];
        s.oth2 += double(y[i]) * y[i];
        s.dot += double(x[i]) * y[i];
      }
    }
    for (size_t t = 0; t < n; ++t) {
      const float* p = a.logits.data() + t * size_t(vocab);
      const float* q = b.logits.data() + t * size_t(vocab);
      const double kl = kl_divergence(p, q, vocab);
      c.mean_kl += kl;
      c.max_kl = std::max(c.max_kl, kl);
      agree += std::max_element(p, p + vocab) - p == std::max_element(q, q + vocab) - q;
    }
    c.tokens += int64_t(n);
  }
  if (c.tokens > 0) {
    c.mean_kl /= double(c.tokens);
    c.top1_agreement = agree / double(c.tokens);
  }
  for (const auto& [layer, s] : sums)
    c.layers.push_back({layer, s.ref2 > 0 ? std::sqrt(s.err2 / s.ref2) : 0,
                        s.ref2 > 0 && s.oth2 > 0 ? s.dot / std::sqrt(s.ref2 * s.oth2) : 1, 0});
  return c;
}

}  // namespace mi::quant
