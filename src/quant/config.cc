#include "quant/config.h"

#include <algorithm>
#include <charconv>

#include "base/json.h"
#include "model/yaml_node.h"
#include "tensor/int4.h"

namespace mi::quant {
namespace {

const std::vector<std::string> kKeys = {"weight_bits",
                                        "activation_bits",
                                        "weight_scheme",
                                        "group_size",
                                        "rounding",
                                        "gptq",
                                        "coverage",
                                        "activation_scheme",
                                        "activations",
                                        "saturation",
                                        "observer",
                                        "percentile",
                                        "calibration_data",
                                        "calibration_samples",
                                        "calibration_length",
                                        "smooth_quant",
                                        "sensitive_layers",
                                        "bound",
                                        "layers"};
const std::vector<std::string> kLayerFormats = {"float", "int8", "int4", "int4_g32", "int4_g64", "int4_g128"};
const std::vector<std::string> kRoundings = {"auto", "nearest", "gptq", "none"};
const std::vector<std::string> kObservers = {"minmax", "percentile", "mse"};
const std::vector<std::string> kActivationSchemes = {"per_token", "per_tensor", "auto"};

// Of a key that occurs twice only one would count.
Status refuse_repeated(const YAML::Node& map, const std::string& what) {
  std::vector<std::string> seen;
  for (const auto& entry : map) {
    const std::string key = entry.first.IsScalar() ? entry.first.Scalar() : "";
    if (std::find(seen.begin(), seen.end(), key) != seen.end())
      return bad_input("{}: the key '{}' occurs twice", what, key);
    seen.push_back(key);
  }
  return {};
}

Status refuse_unknown(const YAML::Node& map, const std::vector<std::string>& known, const std::string& what) {
  MI_TRY_VOID(refuse_repeated(map, what));
  for (const auto& entry : map) {
    if (!entry.first.IsScalar()) return bad_input("{}: line {}: a key has to be a word", what, entry.first.Mark().line + 1);
    const std::string key = entry.first.Scalar();
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    const std::string near = nearest_name(key, known);
    return bad_input("{}: unknown key '{}'{}", what, key,
                     near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near));
  }
  return {};
}

// yaml-cpp takes 010 for 8.
bool decode(const YAML::Node& n, int64_t& value) {
  if (!n.IsScalar()) return false;
  const std::string& s = n.Scalar();
  const size_t digit = s.starts_with('-') ? 1 : 0;
  const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), value);
  return error == std::errc() && end == s.data() + s.size() && (s[digit] != '0' || s.size() == digit + 1);
}
template <typename T>
bool decode(const YAML::Node& n, T& value) {
  return n.IsScalar() && YAML::convert<T>::decode(n, value);
}

template <typename T>
Result<T> get(const YAML::Node& map, const char* key, T fallback, const std::string& what, const char* expected) {
  const YAML::Node n = map[key];
  if (!n || n.IsNull()) return fallback;
  T value{};
  if (!decode(n, value)) return bad_input("{}: {}: expected {}{}", what, key, expected, n.IsScalar() ? ", not '" + n.Scalar() + "'" : "");
  return value;
}

Status require(bool ok, const std::string& what, const char* key, const std::string& rule) {
  if (ok) return {};
  return bad_input("{}: {} must be {}", what, key, rule);
}

// A mapping of names or patterns to one of `words`, in the file's order.
template <typename T>
Result<std::vector<std::pair<std::string, T>>> parse_patterns(const YAML::Node& map, const std::vector<std::string>& words,
                                                              const char* key, const char* example,
                                                              const std::string& what) {
  std::vector<std::pair<std::string, T>> entries;
  if (!map || map.IsNull()) return entries;
  if (!map.IsMap()) return bad_input("{}: {}: expected a mapping such as {}", what, key, example);
  MI_TRY_VOID(refuse_repeated(map, fmt::format("{}: {}", what, key)));
  for (const auto& entry : map) {
    const std::string name = entry.first.IsScalar() ? entry.first.Scalar() : "";
    const std::string word = entry.second.IsScalar() ? entry.second.Scalar() : "";
    const auto known = std::find(words.begin(), words.end(), word);
    if (name.empty() || known == words.end())
      return bad_input("{}: {}: {} must be {} or {}{}", what, key,
                       name.empty() ? "every name or re: pattern" : "'" + name + "'",
                       fmt::join(words.begin(), words.end() - 1, ", "), words.back(),
                       word.empty() ? "" : ", not '" + word + "'");
    entries.emplace_back(name, T(known - words.begin()));
  }
  return entries;
}

template <typename T>
Result<T> get_word(const YAML::Node& map, const char* key, T fallback, const std::vector<std::string>& words,
                   const std::string& what) {
  const std::string expected = fmt::format("{} or {}", fmt::join(words.begin(), words.end() - 1, ", "), words.back());
  MI_TRY(const std::string word, get<std::string>(map, key, words[size_t(fallback)], what, expected.c_str()));
  const auto known = std::find(words.begin(), words.end(), word);
  if (known == words.end()) return bad_input("{}: {} must be {}, not '{}'", what, key, expected, word);
  return T(known - words.begin());
}

Status parse_smoothing(const YAML::Node& s, const std::string& what, QuantConfig* c) {
  if (!s || s.IsNull()) return {};
  if (!s.IsMap()) return bad_input("{}: smooth_quant: expected {{enable: true, alpha: 0.6}}", what);
  MI_TRY_VOID(refuse_unknown(s, {"enable", "alpha", "layers", "down"}, what + ": smooth_quant"));
  MI_TRY(c->smooth, get<bool>(s, "enable", true, what, "true or false"));
  MI_TRY(c->smooth_down, get<bool>(s, "down", false, what, "true or false"));
  if (s["alpha"] && s["alpha"].IsScalar() && s["alpha"].Scalar() == "search") {
    c->search_alpha = true;
  } else {
    MI_TRY(c->smooth_alpha, get<double>(s, "alpha", c->smooth_alpha, what, "a number, or search"));
    MI_TRY_VOID(require(c->smooth_alpha >= 0 && c->smooth_alpha <= 1, what, "smooth_quant.alpha", "between 0 and 1"));
  }
  const YAML::Node layers = s["layers"];
  if (!layers || layers.IsNull()) return {};
  if (!layers.IsMap()) return bad_input("{}: smooth_quant.layers: expected a mapping such as {{3: 0.7}}", what);
  MI_TRY_VOID(refuse_repeated(layers, what + ": smooth_quant.layers"));
  for (const auto& entry : layers) {
    int64_t layer = 0;
    double alpha = 0;
    if (!decode(entry.first, layer) || !decode(entry.second, alpha))
      return bad_input("{}: smooth_quant.layers: expected numbers of layers with an alpha, such as {{3: 0.7}}", what);
    MI_TRY_VOID(require(layer >= 0 && layer <= INT32_MAX && alpha >= 0 && alpha <= 1, what, "smooth_quant.layers", "alphas between 0 and 1"));
    c->layer_alpha[int32_t(layer)] = alpha;
  }
  return {};
}

// A list of names or patterns, or auto.
Status parse_names(const YAML::Node& n, const char* key, const std::string& what, std::vector<std::string>* names, bool* automatic) {
  *automatic = n.IsScalar() && n.Scalar() == "auto";
  if (*automatic) return {};
  if (!n.IsSequence()) return bad_input("{}: {}: expected a list of names or re: patterns, or auto", what, key);
  for (const YAML::Node& name : n) {
    if (!name.IsScalar() || name.Scalar().empty())
      return bad_input("{}: {}: every entry must be a name or a re: pattern", what, key);
    names->push_back(name.Scalar());
  }
  return {};
}

Status parse_saturation(const YAML::Node& s, const std::string& what, QuantConfig* c) {
  if (!s || s.IsNull()) return {};
  if (!s.IsMap()) return bad_input("{}: saturation: expected {{percentile: 99.9, layers: [\"re:.*down\"]}}", what);
  MI_TRY_VOID(refuse_unknown(s, {"percentile", "layers"}, what + ": saturation"));
  MI_TRY(c->saturation_percentile, get<double>(s, "percentile", c->saturation_percentile, what, "a number"));
  MI_TRY_VOID(require(c->saturation_percentile > 50 && c->saturation_percentile < 100, what, "saturation.percentile",
                      "above 50 and below 100"));
  const YAML::Node layers = s["layers"];
  if (!layers || layers.IsNull())
    return bad_input("{}: saturation.layers is missing: a list of names or re: patterns, or auto", what);
  MI_TRY_VOID(parse_names(layers, "saturation.layers", what, &c->saturated_layers, &c->saturation_auto));
  if (!c->saturation_auto && c->saturated_layers.empty())
    c->notes.push_back(fmt::format("{}: saturation has no effect: its layers are an empty list", what));
  return {};
}

// What contradicts the rest is refused; what only has no effect is noted. Values that are the defaults say nothing:
// written recipes hold them.
Status judge_unused(const std::string& what, QuantConfig* c) {
  const QuantConfig usual;
  const bool autos = c->activations == ActivationScheme::kAuto || c->sensitive_auto;
  if (c->bound != usual.bound && !autos)
    return bad_input("{}: bound goes with activation_scheme: auto and sensitive_layers: auto; remove it, or use one of them", what);
  if (c->percentile != usual.percentile && c->observer != Observer::kPercentile)
    return bad_input("{}: percentile goes with observer: percentile; remove it, or set the observer", what);
  const auto note = [&](bool unused, const char* text) {
    if (unused) c->notes.push_back(fmt::format("{}: {}", what, text));
  };
  const bool any_static = c->activations != ActivationScheme::kPerToken ||
                          std::any_of(c->activation_layers.begin(), c->activation_layers.end(),
                                      [](const auto& l) { return l.second == ActivationScheme::kPerTensor; });
  note(c->observer != usual.observer && !any_static, "observer has no effect: no scale of this recipe is per_tensor");
  note((c->gptq_damping != usual.gptq_damping || c->gptq_tokens != usual.gptq_tokens) &&
           (c->rounding == Rounding::kNearest || c->rounding == Rounding::kNone),
       "gptq has no effect with this rounding");
  note(c->rounding == Rounding::kGptq && c->weights == WeightScheme::kPerTensor,
       "rounding: gptq does not reach weight_scheme: per_tensor, which is rounded to nearest");
  note(!c->smooth && (c->search_alpha || c->smooth_alpha != usual.smooth_alpha || !c->layer_alpha.empty() || c->smooth_down),
       "alpha, layers and down of smooth_quant have no effect: enable is false");
  for (const auto& [pattern, format] : c->layers)
    if (c->rounding == Rounding::kNone && format != LayerFormat::kFloat)
      return bad_input("{}: rounding: none leaves the model in float, but layers wants '{}' at {}; remove one of them", what, pattern,
                       layer_format_name(format));
  note(c->rounding == Rounding::kNone && (c->weight_bits != usual.weight_bits || c->activations != usual.activations),
       "weight_bits and activation_scheme have no effect: rounding: none leaves the model in float");
  return {};
}

Result<QuantConfig> parse(const YAML::Node& root, const std::string& what) {
  if (!root.IsMap()) return bad_input("{}: expected a mapping with the key 'quant'", what);
  for (const std::string& key : kKeys)
    if (root[key]) return bad_input("{}: the key '{}' has to stand under 'quant:'", what, key);
  MI_TRY_VOID(refuse_unknown(root, {"quant"}, what));
  const YAML::Node q = root["quant"];
  if (!q || !q.IsMap()) return bad_input("{}: 'quant:' with its settings is missing", what);
  MI_TRY_VOID(refuse_unknown(q, kKeys, what));

  QuantConfig c;
  MI_TRY(c.weight_bits, get<int64_t>(q, "weight_bits", 8, what, "an integer"));
  MI_TRY(const int64_t activation_bits, get<int64_t>(q, "activation_bits", 8, what, "an integer"));
  MI_TRY_VOID(require(c.weight_bits == 8 || c.weight_bits == 4, what, "weight_bits", "8 or 4"));
  MI_TRY_VOID(require(activation_bits == 8, what, "activation_bits", "8"));

  const bool int4 = c.weight_bits == 4;
  const std::string schemes = int4 ? "per_group with weight_bits 4" : "per_channel or per_tensor with weight_bits 8";
  MI_TRY(const std::string ws,
         get<std::string>(q, "weight_scheme", int4 ? "per_group" : "per_channel", what, schemes.c_str()));
  MI_TRY_VOID(require(int4 ? ws == "per_group" : ws == "per_channel" || ws == "per_tensor", what, "weight_scheme",
                      schemes + ", not '" + ws + "'"));
  c.weights = int4                 ? WeightScheme::kPerGroup
              : ws == "per_tensor" ? WeightScheme::kPerTensor
                                   : WeightScheme::kPerChannel;
  MI_TRY(c.layers, parse_patterns<LayerFormat>(q["layers"], kLayerFormats, "layers", "{lm_head: int8}", what));
  const bool any_int4 = int4 || std::any_of(c.layers.begin(), c.layers.end(),
                                            [](const auto& l) { return l.second == LayerFormat::kInt4; });
  if (!any_int4 && q["group_size"])
    return bad_input("{}: group_size goes with weight_bits 4; with 8 a scale is per_channel or per_tensor", what);
  MI_TRY(c.group_size, get<int64_t>(q, "group_size", c.group_size, what, "32, 64 or 128"));
  MI_TRY_VOID(require(int4_group_ok(c.group_size), what, "group_size", "32, 64 or 128"));
  MI_TRY(c.activations, get_word(q, "activation_scheme", c.activations, kActivationSchemes, what));
  MI_TRY(c.activation_layers, parse_patterns<ActivationScheme>(q["activations"], {"per_token", "per_tensor"}, "activations",
                                                               "{\"re:.*down\": per_token}", what));
  MI_TRY(c.bound, get<double>(q, "bound", c.bound, what, "a number"));
  MI_TRY_VOID(require(c.bound >= 0, what, "bound", "0 or more"));
  MI_TRY(c.observer, get_word(q, "observer", c.observer, kObservers, what));
  MI_TRY(c.percentile, get<double>(q, "percentile", c.percentile, what, "a number"));
  MI_TRY_VOID(require(c.percentile > 50 && c.percentile <= 100, what, "percentile", "above 50 and at most 100"));
  MI_TRY(c.rounding, get_word(q, "rounding", c.rounding, kRoundings, what));
  if (const YAML::Node s = q["gptq"]; s && !s.IsNull()) {
    if (!s.IsMap()) return bad_input("{}: gptq: expected {{damping: 0.01, tokens: 8192}}", what);
    MI_TRY_VOID(refuse_unknown(s, {"damping", "tokens"}, what + ": gptq"));
    MI_TRY(c.gptq_damping, get<double>(s, "damping", c.gptq_damping, what, "a number"));
    MI_TRY_VOID(require(c.gptq_damping > 0 && c.gptq_damping <= 100, what, "gptq.damping", "above 0 and at most 100"));
    MI_TRY(c.gptq_tokens, get<int64_t>(s, "tokens", c.gptq_tokens, what, "an integer"));
    MI_TRY_VOID(require(c.gptq_tokens >= 1 && c.gptq_tokens <= 1'000'000, what, "gptq.tokens", "between 1 and 1000000"));
  }

  if (const YAML::Node s = q["coverage"]; s && !s.IsNull()) {
    if (!s.IsMap()) return bad_input("{}: coverage: expected {{min_tokens: 8, force: false}}", what);
    MI_TRY_VOID(refuse_unknown(s, {"min_tokens", "force"}, what + ": coverage"));
    MI_TRY(c.min_expert_tokens, get<int64_t>(s, "min_tokens", c.min_expert_tokens, what, "an integer"));
    MI_TRY_VOID(require(c.min_expert_tokens >= 0, what, "coverage.min_tokens", "0 or more"));
    MI_TRY(c.force_experts, get<bool>(s, "force", c.force_experts, what, "true or false"));
  }
  MI_TRY(c.calibration_data, get<std::string>(q, "calibration_data", "", what, "a file name"));
  MI_TRY(c.calibration_samples, get<int64_t>(q, "calibration_samples", c.calibration_samples, what, "an integer"));
  MI_TRY(c.calibration_length, get<int64_t>(q, "calibration_length", c.calibration_length, what, "an integer"));
  MI_TRY_VOID(require(c.calibration_samples >= 1 && c.calibration_samples <= 1'000'000, what, "calibration_samples",
                      "between 1 and 1000000"));
  MI_TRY_VOID(require(c.calibration_length >= 1 && c.calibration_length <= 131'072, what, "calibration_length",
                      "between 1 and 131072"));

  MI_TRY_VOID(parse_smoothing(q["smooth_quant"], what, &c));
  MI_TRY_VOID(parse_saturation(q["saturation"], what, &c));
  if (const YAML::Node s = q["sensitive_layers"]; s && !s.IsNull())
    MI_TRY_VOID(parse_names(s, "sensitive_layers", what, &c.sensitive_layers, &c.sensitive_auto));
  c.source = what;
  MI_TRY_VOID(judge_unused(what, &c));
  return c;
}

}  // namespace

Result<QuantConfig> parse_quant_config(std::string_view yaml, const std::string& what) {
  MI_TRY(const YAML::Node root, model::load_yaml(yaml, what));
  try {
    return parse(root, what);
  } catch (const YAML::Exception& e) {
    return model::yaml_error(what, e);
  }
}

Result<QuantConfig> load_quant_config(const Path& file) {
  MI_TRY(const std::string text, read_file(file, size_t(1) << 20));
  MI_TRY(QuantConfig c, parse_quant_config(text, file.filename().string()));
  if (!c.calibration_data.empty() && Path(c.calibration_data).is_relative())
    c.calibration_data = (file.parent_path() / c.calibration_data).string();
  return c;
}

const char* layer_format_name(LayerFormat f) { return kLayerFormats[size_t(f)].c_str(); }
const char* name_of(Rounding r) { return kRoundings[size_t(r)].c_str(); }
const char* name_of(Observer o) { return kObservers[size_t(o)].c_str(); }
const char* name_of(ActivationScheme a) { return kActivationSchemes[size_t(a)].c_str(); }

}  // namespace mi::quant
