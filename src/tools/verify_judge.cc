#include "tools/verify_judge.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/util.h"
#include "quant/compare.h"

namespace mi::tools {
namespace {

double max_abs_difference(std::span<const float> a, std::span<const float> b) {
  double m = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = std::fabs(double(a[i]) - b[i]);
    if (!(d <= m)) m = std::isnan(d) ? INFINITY : d;  // a NaN is the worst difference
  }
  return m;
}

double relative_rms(std::span<const float> found, std::span<const float> reference) {
  double e = 0, r = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    const double d = double(found[i]) - reference[i];
    e += d * d;
    r += double(reference[i]) * reference[i];
  }
  return r > 0 ? std::sqrt(e / r) : std::sqrt(e);
}

// Floats in the order of their values; neighbours differ by 1.
int64_t ordered(float f) {
  int32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits >= 0 ? bits : int64_t(std::numeric_limits<int32_t>::min()) - bits;
}

}  // namespace

std::string judged_precision(const artifact::Manifest& m) {
  using artifact::Packing;
  if (m.model.precision != "fp32") return m.model.precision;
  const auto any = [&](Packing p) {
    return std::any_of(m.weights.begin(), m.weights.end(), [p](const auto& w) { return w.packing == p; });
  };
  return any(Packing::kPackedI4)     ? "w4a8"
         : any(Packing::kPackedI8)   ? "w8a8"
         : any(Packing::kPackedBF16) ? "bf16"
                                     : "fp32";
}

Judge::Judge(const std::string& precision, const std::string& kv_type, VerifyLimits limits)
    : rounds_(precision != "fp32" || kv_type != "f32"), limits_(limits) {
  const bool int4 = precision == "w4a8";
  if (limits_.max_kl < 0) limits_.max_kl = int4 ? 0.25 : 0.02;
  max_alone_ = limits_.max_layer_deviation >= 0 ? limits_.max_layer_deviation : int4 ? 0.4 : 0.15;
  if (limits_.max_layer_deviation < 0) limits_.max_layer_deviation = int4 ? 0.4 : 0.25;
}

void Judge::row(std::string what, double found, double limit, std::string unit, bool judged) {
  const bool ok = found <= limit;
  if (judged && !ok && report.first_bad.empty()) report.first_bad = what;
  report.rows.push_back({std::move(what), found, limit, ok, judged, std::move(unit)});
}

void Judge::hidden(const std::string& what, std::span<const float> found, std::span<const float> reference) {
  if (rounds_)
    row(what, relative_rms(found, reference), limits_.max_layer_deviation, "relative");
  else
    row(what, max_abs_difference(found, reference), limits_.hidden_max_abs, "max abs");
}

void Judge::alone(const std::string& what, std::span<const float> found, std::span<const float> reference,
                  std::span<const float> before) {
  double error = 0, added = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    const double e = double(found[i]) - reference[i], a = double(reference[i]) - before[i];
    error += e * e;
    added += a * a;
  }
  const double deviation = added > 0 ? std::sqrt(error / added) : std::sqrt(error);
  row(what, std::isnan(deviation) ? INFINITY : deviation, max_alone_, "relative");
}

void Judge::routing(const std::string& what, const Trace::Routing& found, std::span<const int32_t> ids,
                    std::span<const float> weights) {
  int64_t differ = 0;
  for (size_t i = 0; i < ids.size(); ++i) differ += found.ids[i] != ids[i];
  row(what + " experts", double(differ), 0, "differ", !rounds_);
  if (differ == 0 && !weights.empty())
    row(what + " weights", max_abs_difference(found.weights, weights), limits_.weights_max_abs, "max abs", !rounds_);
}

void Judge::logits(const std::string& what, std::span<const float> found, std::span<const float> reference,
                   int64_t vocab, bool judged) {
  const int64_t tokens = int64_t(found.size()) / vocab;
  double kl = 0;
  for (int64_t t = 0; t < tokens; ++t)
    kl += quant::kl_divergence(reference.data() + t * vocab, found.data() + t * vocab, vocab);
  report.mean_kl = (report.mean_kl * double(report.tokens) + kl) / double(report.tokens + tokens);
  report.tokens += tokens;
  if (rounds_) {
    row(what + " logits", kl / double(tokens), limits_.max_kl, "mean KL", judged);
    return;
  }
  double unit = 1;
  if (limits_.logits_relative) {
    unit = 0;
    for (float x : reference) unit = std::max(unit, std::fabs(double(x)));
  }
  row(what + " logits", max_abs_difference(found, reference), limits_.logits_max_abs * unit, "max abs");
}

void Judge::kl_over_all() {
  if (rounds_) row("logits over all texts", report.mean_kl, limits_.max_kl, "mean KL");
}

void Judge::weight(const std::string& what, std::span<const float> found, std::span<const float> reference) {
  int64_t differ = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    const int64_t ulps = ordered(found[i]) - ordered(reference[i]);
    differ += std::isnan(found[i]) || ulps > 1 || ulps < -1;
  }
  row(what, double(differ), 0, "differ");
}

}  // namespace mi::tools
