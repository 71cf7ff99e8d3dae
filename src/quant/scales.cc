#include "quant/scales.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "ir/edit.h"
#include "quant/choice.h"

namespace mi::quant {

size_t sampling_step(size_t values, int64_t cols) {
  constexpr size_t kMost = size_t(1) << 22;
  size_t step = std::max<size_t>(1, values / kMost);
  while (std::gcd(step, size_t(cols)) != 1) ++step;
  return step;
}

namespace {

std::string scale_name(const std::string& value) { return "act." + value + ".scale"; }

std::string without_weight(std::string weight) {
  constexpr std::string_view kSuffix = ".weight";
  if (weight.ends_with(kSuffix)) weight.resize(weight.size() - kSuffix.size());
  return weight;
}

}  // namespace

Result<StoredScales> StoredScales::choose(const QuantConfig& c, const ir::Graph& g) {
  // Matrices of layers, and the value that each rounded one reads. A pattern may mean one that stays float: which these
  // are may have been found out (sensitive_layers: auto, a search).
  std::vector<std::string> modules;
  std::map<std::string, std::pair<int32_t, std::string>> value_of;
  for (const ir::Block& b : g.blocks)
    for (const MatrixUse& u : matrix_uses(b))
      for (int32_t layer : b.layers) {
        const ir::WeightDecl& d = b.weights[size_t(u.weight)];
        modules.push_back(without_weight(ir::full_name(d.name, layer)));
        if (ir::is_quantized(d)) value_of[modules.back()] = {layer, u.value};
      }
  std::map<std::string, ActivationScheme> scheme;
  for (const auto& [m, value] : value_of) scheme[m] = c.activations;
  for (const auto& [pattern, s] : c.activation_layers) {
    MI_TRY(const auto hits, matching(c.key("activations"), pattern, modules));
    for (const std::string& m : hits)
      if (value_of.count(m)) scheme[m] = s;
  }
  std::set<std::string> saturated;
  for (const std::string& pattern : c.saturated_layers) {
    MI_TRY(const auto hits, matching(c.key("saturation.layers"), pattern, modules));
    saturated.insert(hits.begin(), hits.end());
  }
  StoredScales out;
  for (const auto& [m, value] : value_of) out.values_[value] = Kind::kStatic;
  for (const auto& [m, s] : scheme)
    if (s == ActivationScheme::kPerToken) out.values_.erase(value_of.at(m));
  for (const auto& [m, value] : value_of)
    if (saturated.count(m)) out.values_[value] = Kind::kSaturates;
  return out;
}

void StoredScales::declare(ir::Graph& g) const {
  if (!any()) return;
  ir::split_layers(g, [&](const ir::Block& b, int32_t layer) {
    std::string key;
    for (const ir::Node& n : b.nodes)
      if (n.op == Op::kQuantize) {
        const std::string& value = b.values[size_t(n.in[0])].name;
        key += is_static(layer, value) ? 's' : saturates(layer, value) ? 'c' : '-';
      }
    return key;
  });
  for (ir::Block& b : g.blocks)
    for (ir::Node& n : b.nodes) {
      if (n.op != Op::kQuantize) continue;
      const std::string value = b.values[size_t(n.in[0])].name;
      const auto it = values_.find({b.layers[0], value});
      if (it == values_.end() || !n.weights.empty()) continue;
      n.params = QuantizeParams{it->second == Kind::kSaturates};
      n.weights.push_back({Role::kInScale, {int32_t(b.weights.size())}});
      b.weights.push_back(
          {scale_name(value), DType::kF32, {1}, ir::WeightFormat::kFloat, ir::Mark::kConstant, 0});
    }
}

std::map<std::string, float> StoredScales::measure(const LayerCapture& seen, const LayerSmoothing& smoothing,
                                                   const QuantConfig& c) const {
  std::map<std::string, float> out;
  for (const auto& [value, fed] : seen.values) {
    const auto kind = values_.find({seen.layer, value});
    if (kind == values_.end()) continue;
    const bool cut = kind->second == Kind::kSaturates;
    const Observer observer = cut ? Observer::kPercentile : c.observer;
    const auto it = smoothing.divisor.find(value);
    const float* s = it == smoothing.divisor.end() ? nullptr : it->second.data();
    float limit = 0;
    const bool per_expert = it != smoothing.divisor.end() && int64_t(it->second.size()) != fed.cols;
    if (observer == Observer::kMinMax && !per_expert) {
      for (int64_t i = 0; i < fed.cols; ++i)
        limit = std::max(limit, s ? fed.max_abs[size_t(i)] / s[i] : fed.max_abs[size_t(i)]);
    } else {
      std::vector<float> magnitudes;
      const size_t step = sampling_step(fed.rows.size(), fed.cols);
      for (size_t i = 0; i < fed.rows.size(); i += step) {
        const size_t row = i / size_t(fed.cols), column = i % size_t(fed.cols);
        const float* of_row = per_expert ? s + int64_t(seen.chosen[row]) * fed.cols : s;
        magnitudes.push_back(std::fabs(s ? fed.rows[i] / of_row[column] : fed.rows[i]));
      }
      limit = observed_limit(std::move(magnitudes), observer, cut ? c.saturation_percentile : c.percentile);
    }
    out[ir::full_name(scale_name(value), seen.layer)] = limit / 127.0f;
  }
  return out;
}

float observed_limit(std::vector<float> m, Observer observer, double percentile) {
  if (m.empty()) return 0;
  const float top = *std::max_element(m.begin(), m.end());
  if (observer == Observer::kPercentile) {
    const size_t at = std::min(m.size() - 1, size_t(double(m.size()) * percentile / 100));
    std::nth_element(m.begin(), m.begin() + ptrdiff_t(at), m.end());
    return m[at];
  }
  if (observer == Observer::kMinMax || !(top > 0)) return top;
  float best = top;
  double least = INFINITY;
  for (int step = 0; step < 40; ++step) {  // limits from the maximum downwards, each 0.9 of the one before
    const float limit = top * float(std::pow(0.9, step)), scale = limit / 127.0f;
    double error = 0;
    for (float v : m) {
      const float d = std::min(std::nearbyint(v / scale), 127.0f) * scale - v;
      error += double(d) * d;
    }
    if (error < least) best = limit, least = error;
  }
  return best;
}

}  // namespace mi::quant
