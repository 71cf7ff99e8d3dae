#include "quant/search.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "base/util.h"

namespace mi::quant {
namespace {

double kl_of(const Sensitivity& s, const Unit& u, LayerFormat f) {
  if (f == LayerFormat::kFloat) return 0;
  const Candidate* c = s.find(u.name, f);
  MI_CHECK(c, "{} was not looked at as {}", u.name, layer_format_name(f));
  return c->kl;
}

bool dominates(const MixedChoice& a, const MixedChoice& b) {
  return a.kl <= b.kl && a.seconds <= b.seconds && a.bytes <= b.bytes && a.expert_bits <= b.expert_bits &&
         (a.kl < b.kl || a.seconds < b.seconds || a.bytes < b.bytes || a.expert_bits < b.expert_bits);
}

struct Option {
  double kl;  // to the power at which it adds up
  double seconds, bytes;
  double expert_bytes;  // what a limit on the experts' bits counts
};

std::string yaml_quoted(const std::string& s) {
  std::string out = "\"";
  for (char c : s) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

}  // namespace

std::vector<MixedChoice> pareto_front(const Sensitivity& s, const CostTable& costs,
                                      const std::vector<LayerFormat>& formats, DType float_type) {
  std::vector<std::vector<Option>> options(s.units.size());
  double all_seconds = 0, all_bytes = 0, all_kl = 0;
  const bool has_experts =
      std::any_of(s.units.begin(), s.units.end(), [](const Unit& u) { return u.mark == ir::Mark::kExpert; });
  const auto counts_as_expert = [&](const Unit& u) { return !has_experts || u.mark == ir::Mark::kExpert; };
  for (size_t u = 0; u < s.units.size(); ++u)
    for (LayerFormat f : formats) {
      const double bytes = double(unit_bytes(s.units[u], f, float_type));
      options[u].push_back({std::pow(kl_of(s, s.units[u], f), s.power), costs.seconds(s.units[u], f), bytes,
                            counts_as_expert(s.units[u]) ? bytes : 0});
      all_kl += options[u].back().kl;
      all_seconds = std::max(all_seconds, options[u].back().seconds * double(s.units.size()));
      all_bytes = std::max(all_bytes, options[u].back().bytes * double(s.units.size()));
    }
  // Every unit's first option of the least, in the order of `less`.
  const auto choose = [&](const auto& less) {
    MixedChoice c;
    double bits = 0, weights = 0, expert_bits = 0, expert_weights = 0;
    for (size_t u = 0; u < s.units.size(); ++u) {
      const size_t best = size_t(std::min_element(options[u].begin(), options[u].end(), less) - options[u].begin());
      const Option& o = options[u][best];
      c.formats.push_back(formats[best]);
      c.kl += o.kl;
      c.seconds += o.seconds;
      c.bytes += int64_t(o.bytes);
      double n = 0;
      for (const UnitMatrix& m : s.units[u].matrices) n += m.count * double(m.n * m.k);
      bits += 8 * o.bytes;
      weights += n;
      if (counts_as_expert(s.units[u])) {
        expert_bits += 8 * o.bytes;
        expert_weights += n;
      }
    }
    c.kl = std::pow(c.kl, 1 / s.power);
    c.bits = weights > 0 ? bits / weights : 0;
    c.expert_bits = expert_weights > 0 ? expert_bits / expert_weights : 0;
    return c;
  };
  std::vector<MixedChoice> found;
  const auto add = [&](double per_second, double per_byte, double per_expert_byte) {
    const auto cost = [&](const Option& o) {
      return o.kl + per_second * o.seconds + per_byte * o.bytes + per_expert_byte * o.expert_bytes;
    };
    found.push_back(choose([&](const Option& a, const Option& b) {
      return std::tuple(cost(a), a.seconds) < std::tuple(cost(b), b.seconds);
    }));
  };
  // Exchange rates over twelve orders of magnitude around "all of the KL for all of the time".
  constexpr int kRates = 400, kExpertRates = 60;
  const auto rate_of = [&](int i, int n) { return std::pow(10.0, -8 + 12.0 * i / (n - 1)) * std::max(all_kl, 1e-9); };
  for (int i = 0; i < kRates; ++i) {
    const double rate = rate_of(i, kRates);
    for (const double share : {0.0, 0.5, 1.0}) add(rate * (1 - share) / all_seconds, rate * share / all_bytes, 0);
    // Time for nothing: no rate is small enough for the least of many parts.
    add(0, 0, rate / all_bytes);
  }
  // A limit on the experts' bits is no reason to take anything from the other parts: their bytes have a rate of their own.
  for (int i = 0; i < kExpertRates; ++i)
    for (int j = 0; j < kExpertRates; ++j) add(rate_of(i, kExpertRates) / all_seconds, 0, rate_of(j, kExpertRates) / all_bytes);
  // The ends, where no rate is small or large enough for the smallest of many units.
  found.push_back(choose([](const Option& a, const Option& b) { return std::tie(a.kl, a.seconds) < std::tie(b.kl, b.seconds); }));
  found.push_back(choose([](const Option& a, const Option& b) { return std::tie(a.seconds, a.kl) < std::tie(b.seconds, b.kl); }));
  found.push_back(choose([](const Option& a, const Option& b) { return std::tie(a.bytes, a.kl) < std::tie(b.bytes, b.kl); }));
  std::vector<MixedChoice> front;
  for (const MixedChoice& c : found) {
    if (std::any_of(found.begin(), found.end(), [&](const MixedChoice& o) { return dominates(o, c); })) continue;
    if (std::any_of(front.begin(), front.end(), [&](const MixedChoice& o) { return o.formats == c.formats; })) continue;
    front.push_back(c);
  }
  std::sort(front.begin(), front.end(), [](const MixedChoice& a, const MixedChoice& b) { return a.kl < b.kl; });
  return front;
}

Result<MixedChoice> pick(const std::vector<MixedChoice>& front, const SearchLimits& l) {
  const auto within = [&](const MixedChoice& c) { return c.bytes <= l.max_bytes && c.expert_bits <= l.max_bits; };
  const MixedChoice *best = nullptr, *truest = nullptr, *smallest = nullptr, *fewest_bits = nullptr;
  for (const MixedChoice& c : front) {
    if (!smallest || c.bytes < smallest->bytes) smallest = &c;
    if (!fewest_bits || c.expert_bits < fewest_bits->expert_bits) fewest_bits = &c;
    if (!within(c)) continue;
    if (!truest || c.kl < truest->kl) truest = &c;
    if (c.kl > l.max_kl) continue;
    if (!best || (std::isfinite(l.max_kl) ? c.seconds < best->seconds : c.kl < best->kl)) best = &c;
  }
  if (best) return *best;
  if (truest)
    return fail(ErrorCode::kCheckFailed,
                "no choice of formats is within --max-kl {}: the least that the other limits allow is {:.5f}", l.max_kl,
                truest->kl);
  if (!smallest) return fail(ErrorCode::kCheckFailed, "there is no part whose format could be chosen");
  if (smallest->bytes > l.max_bytes)
    return fail(ErrorCode::kCheckFailed, "no choice of formats is within --memory: the smallest takes {}",
                human_bytes(double(smallest->bytes)));
  if (fewest_bits->expert_bits > l.max_bits)
    return fail(ErrorCode::kCheckFailed, "no choice of formats is within --max-bits {}: the fewest are {:.4g}", l.max_bits,
                fewest_bits->expert_bits);
  return fail(ErrorCode::kCheckFailed, "no choice of formats is within --memory and --max-bits {} together: raise one of them",
              l.max_bits);
}

std::vector<std::string> explain(const Sensitivity& s, const CostTable& costs, const MixedChoice& c,
                                 const std::vector<LayerFormat>& formats) {
  std::vector<std::string> lines;
  for (size_t u = 0; u < s.units.size(); ++u) {
    std::string line = fmt::format("{:<28} {:<9}", s.units[u].name, layer_format_name(c.formats[u]));
    for (LayerFormat f : formats)
      line += fmt::format("  {}{}: KL {:.5f}, {:.1f} us", f == c.formats[u] ? "*" : "", layer_format_name(f),
                          kl_of(s, s.units[u], f), 1e6 * costs.seconds(s.units[u], f));
    lines.push_back(std::move(line));
  }
  return lines;
}

namespace {

// Of the candidates that count: the dearest ones, without which the rest stays within max_kl together. kl^power adds up.
template <typename Counts>
std::vector<const Candidate*> dearest(const Sensitivity& s, double max_kl, double power, Counts counts) {
  std::vector<const Candidate*> all;
  double sum = 0;
  for (const Candidate& c : s.candidates)
    if (counts(c)) {
      all.push_back(&c);
      sum += std::pow(c.kl, power);
    }
  std::stable_sort(all.begin(), all.end(), [](const Candidate* a, const Candidate* b) { return a->kl > b->kl; });
  std::vector<const Candidate*> kept;
  for (const Candidate* c : all) {
    if (sum <= std::pow(max_kl, power)) break;
    kept.push_back(c);
    sum -= std::pow(c->kl, power);
  }
  return kept;
}

}  // namespace

std::vector<const Candidate*> per_token_values(const Sensitivity& s, double max_kl) {
  return dearest(s, max_kl, 1, [](const Candidate& c) { return c.static_scale; });
}

std::vector<const Candidate*> float_units(const Sensitivity& s, LayerFormat f, double max_kl) {
  return dearest(s, max_kl, s.power, [f](const Candidate& c) { return !c.static_scale && c.format == f; });
}

std::string recipe_text(const QuantConfig& c, const std::vector<std::string>& comments) {
  std::string s;
  for (const std::string& line : comments) s += "# " + line + "\n";
  s += "quant:\n";
  s += fmt::format("  weight_bits: {}\n  activation_bits: 8\n", c.weight_bits);
  s += fmt::format("  weight_scheme: {}\n", c.weights == WeightScheme::kPerGroup     ? "per_group"
                                            : c.weights == WeightScheme::kPerChannel ? "per_channel"
                                                                                     : "per_tensor");
  const bool int4 = c.weight_bits == 4 || std::any_of(c.layers.begin(), c.layers.end(),
                                                      [](const auto& l) { return l.second == LayerFormat::kInt4; });
  if (int4) s += fmt::format("  group_size: {}\n", c.group_size);
  s += fmt::format("  rounding: {}\n  gptq: {{damping: {}, tokens: {}}}\n", name_of(c.rounding), c.gptq_damping, c.gptq_tokens);
  s += fmt::format("  coverage: {{min_tokens: {}, force: {}}}\n", c.min_expert_tokens, c.force_experts);
  s += fmt::format("  activation_scheme: {}\n  observer: {}\n", name_of(c.activations), name_of(c.observer));
  if (c.observer == Observer::kPercentile) s += fmt::format("  percentile: {}\n", c.percentile);
  if (!c.activation_layers.empty()) s += "  activations:\n";
  for (const auto& [pattern, scheme] : c.activation_layers)
    s += fmt::format("    {}: {}\n", yaml_quoted(pattern), name_of(scheme));
  if (c.saturation_auto || !c.saturated_layers.empty()) {
    s += fmt::format("  saturation:\n    percentile: {}\n    layers:{}\n", c.saturation_percentile, c.saturation_auto ? " auto" : "");
    for (const std::string& l : c.saturated_layers) s += fmt::format("      - {}\n", yaml_quoted(l));
  }
  if (!c.calibration_data.empty()) s += fmt::format("  calibration_data: {}\n", yaml_quoted(c.calibration_data));
  s += fmt::format("  calibration_samples: {}\n  calibration_length: {}\n", c.calibration_samples, c.calibration_length);
  s += fmt::format("  smooth_quant: {{enable: {}, alpha: {}, down: {}", c.smooth,
                   c.search_alpha ? "search" : fmt::format("{}", c.smooth_alpha), c.smooth_down);
  if (!c.layer_alpha.empty()) {
    s += ", layers: {";
    for (auto it = c.layer_alpha.begin(); it != c.layer_alpha.end(); ++it)
      s += fmt::format("{}{}: {}", it == c.layer_alpha.begin() ? "" : ", ", it->first, it->second);
    s += "}";
  }
  s += "}\n";
  if (c.activations == ActivationScheme::kAuto || c.sensitive_auto) s += fmt::format("  bound: {}\n", c.bound);
  if (c.sensitive_auto) s += "  sensitive_layers: auto\n";
  if (!c.sensitive_layers.empty()) s += "  sensitive_layers:\n";
  for (const std::string& l : c.sensitive_layers) s += fmt::format("    - {}\n", yaml_quoted(l));
  if (!c.layers.empty()) s += "  layers:\n";
  for (const auto& [pattern, format] : c.layers)
    s += fmt::format("    {}: {}\n", yaml_quoted(pattern), layer_format_name(format));
  return s;
}

std::string front_text(const std::vector<MixedChoice>& front, const MixedChoice* picked) {
  std::string s = fmt::format("{:>12} {:>12} {:>10} {:>7} {:>8}   units in float / int8 / int4\n", "KL", "us/token", "bytes",
                              "bits", "experts");
  // A front of hundreds of points says no more than one of forty.
  const size_t step = std::max<size_t>(1, front.size() / 40);
  for (size_t i = 0; i < front.size(); ++i) {
    const MixedChoice& c = front[i];
    const bool is_picked = picked && c.formats == picked->formats;
    if (i % step != 0 && i + 1 != front.size() && !is_picked) continue;
    int64_t counts[3] = {};
    for (LayerFormat f : c.formats) ++counts[f == LayerFormat::kFloat ? 0 : f == LayerFormat::kInt8 ? 1 : 2];
    s += fmt::format("{:>12.5f} {:>12.1f} {:>10} {:>7.2f} {:>8.2f}   {} / {} / {}{}\n", c.kl, 1e6 * c.seconds,
                     human_bytes(double(c.bytes)), c.bits, c.expert_bits, counts[0], counts[1], counts[2],
                     is_picked ? "  <- picked" : "");
  }
  return s;
}

Json front_json(const std::vector<MixedChoice>& front, const Sensitivity& s) {
  Json j = Json::array();
  for (const MixedChoice& c : front) {
    Json formats = Json::object();
    for (size_t u = 0; u < s.units.size(); ++u) formats[s.units[u].name] = layer_format_name(c.formats[u]);
    j.push_back({{"kl", c.kl}, {"seconds", c.seconds}, {"bytes", c.bytes}, {"bits", c.bits}, {"expert_bits", c.expert_bits}, {"formats", formats}});
  }
  return j;
}

}  // namespace mi::quant
