// config.json's rope. v4 files have rope_theta and rope_scaling {type | rope_type, factor, ...}; v5 files have
// rope_parameters {rope_theta, rope_type, ...}, possibly one per layer type; partial_rotary_factor or rotary_dim may
// stand in either place. All places that speak must agree.

#include <cmath>
#include <numbers>

#include "model/arch.h"

namespace mi::model {
namespace {

struct Setting {
  Json value;
  std::string source;
};
using Settings = std::map<std::string, Setting>;  // rope_type, rope_theta, factor, ...

const std::vector<std::string> kKnownKeys = {"rope_type",
                                         "rope_theta",
                                         "factor",
                                         "original_max_position_embeddings",
                                         "attention_factor",
                                         "beta_fast",
                                         "beta_slow",
                                         "mscale",
                                         "mscale_all_dim",
                                         "truncate",
                                         "low_freq_factor",
                                         "high_freq_factor",
                                         "partial_rotary_factor"};

Status put(Settings* s, const std::string& key, const Json& v, const std::string& source, const Config& c) {
  if (v.is_null()) return {};
  const auto [it, added] = s->try_emplace(key, Setting{v, source});
  if (!added && it->second.value != v)
    return bad_input("{}: {} is {} and {} is {}: one of them is wrong, correct the file", c.path(), it->second.source,
                     dump_json(it->second.value), source, dump_json(v));
  return {};
}

Status put_all(Settings* s, const Json& object, const std::string& source, const Config& c) {
  for (const auto& [key, v] : object.items())
    MI_TRY_VOID(put(s, key == "type" ? "rope_type" : key, v, source + "." + key, c));
  return {};
}

class SettingsReader {
 public:
  SettingsReader(const Settings& s, const Config& c) : s_(s), c_(c) {}
  bool has(const char* key) const { return s_.count(key) != 0; }
  Result<double> number(const char* key, std::optional<double> fallback) const {
    const auto it = s_.find(key);
    if (it == s_.end()) {
      if (fallback) return *fallback;
      return bad_input("{}: the rope scaling needs {}", c_.path(), key);
    }
    if (!it->second.value.is_number() || !std::isfinite(it->second.value.get<double>()))
      return bad_input("{}: {}: expected a number", c_.path(), it->second.source);
    return it->second.value.get<double>();
  }
  Result<double> positive(const char* key, std::optional<double> fallback) const {
    MI_TRY(const double v, number(key, fallback));
    if (v <= 0) return bad_input("{}: {} has to be above 0, it is {}", c_.path(), s_.at(key).source, v);
    return v;
  }

 private:
  const Settings& s_;
  const Config& c_;
};

// base^(2i/r) is rounded to float before it is inverted, as the reference implementation does.
std::vector<float> base_frequencies(double theta, int64_t r) {
  std::vector<float> f;
  for (int64_t i = 0; i < r; i += 2) f.push_back(1.0f / float(std::pow(theta, double(float(i) / float(r)))));
  return f;
}

double mscale(double factor, double m) { return factor <= 1 ? 1.0 : 0.1 * m * std::log(factor) + 1.0; }

// d(n) = r ln(original / (2 pi n)) / (2 ln theta); below d(beta_fast) frequencies stay, above d(beta_slow) they are
// divided.
Status yarn(const SettingsReader& in, double theta, int64_t max_positions, const Config& c, RopeSpec* s, bool truncate) {
  MI_TRY(const double original, in.positive("original_max_position_embeddings", double(max_positions)));
  MI_TRY(const double factor, in.positive("factor", double(max_positions) / original));
  MI_TRY(const double fast, in.positive("beta_fast", 32));
  MI_TRY(const double slow, in.positive("beta_slow", 1));
  if (theta <= 1) return bad_input("{}: yarn needs a rope_theta above 1", c.path());
  const double r = double(s->rotary_dim);
  const auto d = [&](double turns) {
    return r * std::log(original / (turns * 2 * std::numbers::pi)) / (2 * std::log(theta));
  };
  double low = d(fast), high = d(slow);
  if (truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, r - 1);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < s->inv_freq.size(); ++i) {
    const double ramp = std::clamp((double(i) - low) / (high - low), 0.0, 1.0);
    s->inv_freq[i] = float(double(s->inv_freq[i]) / factor * ramp + double(s->inv_freq[i]) * (1 - ramp));
  }
  double attention = mscale(factor, 1);
  if (in.has("mscale") && in.has("mscale_all_dim")) {
    MI_TRY(const double m, in.number("mscale", 0));
    MI_TRY(const double all, in.number("mscale_all_dim", 0));
    if (m != 0 && all != 0) attention = mscale(factor, m) / mscale(factor, all);
  }
  MI_TRY(attention, in.number("attention_factor", attention));
  s->attention_factor = float(attention);
  return {};
}

// Long wavelengths are divided by factor, short ones stay, between them it is blended.
Status llama3(const SettingsReader& in, RopeSpec* s) {
  MI_TRY(const double factor, in.positive("factor", {}));
  MI_TRY(const double low, in.positive("low_freq_factor", {}));
  MI_TRY(const double high, in.positive("high_freq_factor", {}));
  MI_TRY(const double original, in.positive("original_max_position_embeddings", {}));
  for (float& f : s->inv_freq) {
    const double wave = 2 * std::numbers::pi / double(f);
    if (wave < original / high) continue;
    if (wave > original / low) {
      f = float(double(f) / factor);
      continue;
    }
    const double smooth = (original / wave - low) / (high - low);
    f = float((1 - smooth) * double(f) / factor + smooth * double(f));
  }
  return {};
}

Result<int64_t> rotary_dim(const RopeRequest& q, const SettingsReader& in, Config& c, const Settings& s) {
  const bool given = in.has("partial_rotary_factor");
  MI_TRY(const double partial, in.positive("partial_rotary_factor", q.partial));
  int64_t dim = int64_t(std::min(double(q.head_dim) * partial, double(q.head_dim) + 1));  // more is refused below
  std::string source;
  MI_TRY(const Json rd, c.raw("rotary_dim", &source));
  if (!source.empty()) {
    if (!rd.is_number_integer()) return bad_input("{}: {}: expected an integer", c.path(), source);
    if ((given || q.check_rotary_dim) && rd != dim)
      return bad_input("{}: {} is {}, but {} of head_dim {} is {}: correct one of them", c.path(), source,
                       dump_json(rd),
                       given ? fmt::format("{} {}", s.at("partial_rotary_factor").source, partial)
                             : fmt::format("the default part {}", partial),
                       q.head_dim, dim);
    dim = rd.get<int64_t>();
  }
  if (dim < 2 || dim % 2 != 0 || dim > q.head_dim)
    return bad_input("{}: {} of {} dimensions of a head would be rotated; an even number up to all is possible",
                     c.path(), dim, q.head_dim);
  return dim;
}

Result<RopeSpec> one_rope(const RopeRequest& q, const Settings& settings, Config& c, const std::string& layer_type) {
  const SettingsReader in(settings, c);
  RopeSpec s;
  s.layer_type = layer_type;
  s.interleaved = q.style == "interleaved";
  MI_TRY(const double theta, in.positive("rope_theta", q.theta));
  MI_TRY(s.rotary_dim, rotary_dim(q, in, c, settings));
  s.inv_freq = base_frequencies(theta, s.rotary_dim);

  std::string type = "default", type_source = "default";
  if (const auto it = settings.find("rope_type"); it != settings.end()) {
    if (!it->second.value.is_string()) return bad_input("{}: {}: expected a name", c.path(), it->second.source);
    type = it->second.value.get<std::string>();
    type_source = it->second.source;
  }
  bool truncate = true;
  if (const auto it = settings.find("truncate"); it != settings.end()) {
    if (!it->second.value.is_boolean()) return bad_input("{}: {}: expected true or false", c.path(), it->second.source);
    truncate = it->second.value.get<bool>();
  }
  if (type == "linear") {
    MI_TRY(const double factor, in.positive("factor", {}));
    for (float& f : s.inv_freq) f = float(double(f) / factor);
  } else if (type == "yarn") {
    MI_TRY_VOID(yarn(in, theta, q.max_positions, c, &s, truncate));
  } else if (type == "llama3") {
    MI_TRY_VOID(llama3(in, &s));
  } else if (type != "default") {
    return bad_input("{}: {}: rope scaling '{}' is not supported; known are default, linear, llama3, yarn", c.path(),
                     type_source, type);
  }
  if (!std::all_of(s.inv_freq.begin(), s.inv_freq.end(), [](float f) { return std::isfinite(f); }))
    return bad_input("{}: rope_theta {} with rope_type {} gives frequencies that are not finite: correct the file",
                     c.path(), theta, type);
  const auto theta_at = settings.find("rope_theta");
  const std::string of = layer_type.empty() ? "" : " of " + layer_type;
  c.note("rope_theta" + of, fmt::format("{:g}", theta),
         theta_at == settings.end() ? "default" : theta_at->second.source);
  c.note("rope_type" + of, type, type_source);
  c.note("rotary_dim" + of, std::to_string(s.rotary_dim), fmt::format("of head_dim {}", q.head_dim));
  for (const auto& [key, v] : settings)
    if (std::find(kKnownKeys.begin(), kKnownKeys.end(), key) == kKnownKeys.end())
      c.note("rope: " + key, dump_json(v.value), v.source + " (has no effect)");
  return s;
}

}  // namespace

Result<std::vector<RopeSpec>> resolve_rope(const RopeRequest& q, Config& c) {
  std::string theta_source, scaling_source, parameters_source, partial_source;
  MI_TRY(const Json theta, c.raw("rope_theta", &theta_source));
  MI_TRY(const Json scaling, c.raw("rope_scaling", &scaling_source));
  MI_TRY(const Json parameters, c.raw("rope_parameters", &parameters_source));
  MI_TRY(const Json partial, c.raw("partial_rotary_factor", &partial_source));
  for (const auto& [j, source] : {std::pair(&scaling, &scaling_source), std::pair(&parameters, &parameters_source)})
    if (!j->is_null() && !j->is_object()) return bad_input("{}: {}: expected an object", c.path(), *source);

  std::vector<std::pair<std::string, const Json*>> sets;  // layer type -> its parameters
  if (parameters.is_object() && !parameters.empty() &&
      std::all_of(parameters.begin(), parameters.end(), [](const Json& v) { return v.is_object(); }))
    for (const auto& [type, p] : parameters.items()) sets.push_back({type, &p});
  else
    sets.push_back({"", &parameters});

  std::vector<RopeSpec> ropes;
  for (const auto& [type, p] : sets) {
    Settings s;
    if (p->is_object()) MI_TRY_VOID(put_all(&s, *p, parameters_source + (type.empty() ? "" : "." + type), c));
    // Values outside a set that is keyed by layer type speak of full attention.
    if (type.empty() || type == "full_attention") {
      if (scaling.is_object()) MI_TRY_VOID(put_all(&s, scaling, scaling_source, c));
      MI_TRY_VOID(put(&s, "rope_theta", theta, theta_source, c));
      MI_TRY_VOID(put(&s, "partial_rotary_factor", partial, partial_source, c));
    }
    const bool silent = !c.root().contains("rope_scaling") && parameters_source.empty() && scaling_source.empty();
    if (silent && q.default_scaling.is_object()) MI_TRY_VOID(put_all(&s, q.default_scaling, "default", c));
    MI_TRY(RopeSpec r, one_rope(q, s, c, sets.size() > 1 ? type : ""));
    ropes.push_back(std::move(r));
  }
  return ropes;
}

}  // namespace mi::model
