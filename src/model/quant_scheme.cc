#include "model/quant_scheme.h"

#include <algorithm>

#include "model/folder.h"

namespace mi::model {
namespace {

using formats::Format;
using formats::Layout;
using formats::Strategy;

const std::vector<std::string> kMethods = {"compressed-tensors", "fp8",          "mxfp8",      "mxfp4", "gptq", "awq",
                                           "modelopt",           "bitsandbytes", "fbgemm_fp8", "quark"};

Json field(const Json& j, const char* key) { return j.is_object() && j.contains(key) ? j[key] : Json(); }

bool is_empty(const Json& v) { return v.is_null() || (v.is_object() && v.empty()) || (v.is_array() && v.empty()); }

// A key whose value has to be one of `allowed` (null: absent or empty); the first that is not is remembered.
void demand(const Json& j, const char* key, const std::vector<Json>& allowed, const std::string& what,
            std::string* unsupported) {
  const Json v = field(j, key);
  for (const Json& a : allowed)
    if (v == a || (a.is_null() && is_empty(v))) return;
  if (unsupported->empty()) *unsupported = fmt::format("{}.{} {}", what, key, dump_json(v));
}

Result<std::optional<Strategy>> read_strategy(const Json& w, const std::string& what) {
  const Json s = field(w, "strategy"), group = field(w, "group_size");
  if (s.is_null()) return std::optional(group.is_null() ? Strategy::kTensor : Strategy::kGroup);
  if (s == "tensor") return std::optional(Strategy::kTensor);
  if (s == "channel") return std::optional(Strategy::kChannel);
  if (s == "group" || s == "tensor_group") return std::optional(Strategy::kGroup);
  if (s == "block") return std::optional(Strategy::kBlock);
  if (!s.is_string()) return bad_input("{}.strategy: expected a name", what);
  return std::optional<Strategy>();
}

Result<int64_t> positive(const Json& j, const char* key, const std::string& what) {
  MI_TRY(const int64_t v, json_get<int64_t>(j, key, what));
  if (v < 1 || v > (int64_t(1) << 31)) return bad_input("{}: {} is {}, expected a positive number", what, key, v);
  return v;
}

Status read_block(const Json& j, const char* key, const std::string& what, Format* f) {
  MI_TRY(const auto block, json_get<std::vector<int64_t>>(j, key, what));
  if (block.size() != 2 || block[0] < 1 || block[1] < 1) return bad_input("{}: {}: expected two sizes", what, key);
  f->strategy = Strategy::kBlock;
  f->block_rows = block[0];
  f->block_cols = block[1];
  return {};
}

// GPTQ and AWQ: -1 means one group for all inputs.
Status read_group_size(const Json& j, const std::string& what, Format* f) {
  f->strategy = Strategy::kGroup;
  MI_TRY(const int64_t g, json_get<int64_t>(j, "group_size", what));
  if (g != -1 && g < 1) return bad_input("{}: group_size is {}, expected a positive number or -1", what, g);
  f->group = std::max<int64_t>(g, 0);
  return {};
}

// They decide whether int8 weights stay int8: what is no such setting must not pass as another one.
Status check_activations(const Json& x, const std::string& what) {
  if (is_empty(x)) return {};
  if (!x.is_object()) return bad_input("{}: expected an object such as {{\"num_bits\": 8, \"type\": \"int\"}}, or null", what);
  const Json bits = field(x, "num_bits"), type = field(x, "type"), symmetric = field(x, "symmetric");
  if (!bits.is_null() && (!bits.is_number_integer() || bits.get<int64_t>() < 1 || bits.get<int64_t>() > 64))
    return bad_input("{}.num_bits: expected a number of bits, not {}; correct it", what, dump_json(bits));
  if (!type.is_null() && type != "int" && type != "float") return bad_input("{}.type: expected int or float, not {}; correct it", what, dump_json(type));
  if (!symmetric.is_null() && !symmetric.is_boolean()) return bad_input("{}.symmetric: expected true or false, not {}; correct it", what, dump_json(symmetric));
  return {};
}

}  // namespace

Result<std::optional<QuantScheme>> QuantScheme::read(Config& c, const Path& folder) {
  std::string source;
  MI_TRY(Json q, c.raw("quantization_config", &source));
  QuantScheme s;
  std::string what = c.path() + ": " + source;
  if (source.empty()) {
    if (folder.empty() || !is_in_folder(folder, "hf_quant_config.json")) return std::optional<QuantScheme>();
    MI_TRY(const Path p, file_in_folder(folder, "hf_quant_config.json", "the folder"));
    MI_TRY(const Json j, read_json(p));
    what = p.string() + ": quantization";
    q = field(j, "quantization");
    if (!q.is_object()) return bad_input("{} is missing", what);
    q["quant_method"] = "modelopt";
  }
  s.path_ = what;
  MI_TRY(s.method_, json_get<std::string>(q, "quant_method", what));
  if (std::find(kMethods.begin(), kMethods.end(), s.method_) == kMethods.end()) {
    const std::string near = nearest_name(s.method_, kMethods);
    return bad_input("{}: quant_method '{}' is not known{}; known are {}", what, s.method_,
                     near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near), fmt::join(kMethods, ", "));
  }
  if (s.method_ == "compressed-tensors")
    MI_TRY_VOID(s.read_compressed_tensors(q, what));
  else if (s.method_ == "modelopt")
    MI_TRY_VOID(s.read_modelopt(q, what));
  else if (s.method_ == "fp8" || s.method_ == "mxfp8")
    MI_TRY_VOID(s.read_fp8(q, what));
  else if (s.method_ == "mxfp4")
    s.add_everything({.layout = Layout::kMxFp4Blocks, .bits = 4, .strategy = Strategy::kGroup, .group = 32});
  else if (s.method_ == "gptq")
    MI_TRY_VOID(s.read_gptq(q, what));
  else if (s.method_ == "awq")
    MI_TRY_VOID(s.read_awq(q, what));
  else
    s.unsupported_ = fmt::format("quant_method '{}'", s.method_);
  return std::optional(std::move(s));
}

void QuantScheme::add_everything(Format f) {
  Group g;
  g.targets.push_back({"Linear", std::nullopt});
  g.format = f;
  groups_.push_back(std::move(g));
}

Status QuantScheme::read_group(const Json& g, const std::string& top, const std::string& at, const std::string& what,
                               Group* out) {
  MI_TRY(const auto targets, json_get<std::vector<std::string>>(g, "targets", what + ": " + at));
  for (const std::string& p : targets) {
    MI_TRY(Pattern pattern, read_pattern(p, what + ": " + at + ".targets"));
    out->targets.push_back(std::move(pattern));
  }
  const Json w = field(g, "weights"), x = field(g, "input_activations");
  if (w.is_null()) return {};  // only activations: the weights are float
  std::string odd;
  Format f;
  MI_TRY(const std::string format, json_get_or<std::string>(g, "format", top, what + ": " + at));
  const std::string weights = at + ".weights";
  MI_TRY(const auto strategy, read_strategy(w, what + ": " + weights));
  demand(w, "dynamic", {false, Json()}, weights, &odd);
  demand(g, "output_activations", {Json()}, at, &odd);
  demand(w, "actorder", {Json(), "group", "weight", "static", "dynamic", false}, weights, &odd);
  if (!strategy) odd = fmt::format("{}.strategy {}", weights, dump_json(field(w, "strategy")));
  f.strategy = strategy.value_or(Strategy::kTensor);
  MI_TRY(f.symmetric, json_get_or<bool>(w, "symmetric", true, what + ": " + weights));
  // "group" and its older spelling true keep the order of the weights and name each input's group.
  f.group_index = field(w, "actorder") == "group" || field(w, "actorder") == true;
  const Json type = field(w, "type");
  f.bits = 8;
  if (format == "pack-quantized") {
    f.layout = Layout::kPackedInt;
    demand(w, "type", {"int"}, weights, &odd);
    demand(w, "num_bits", {4, 8}, weights, &odd);
    if (field(w, "num_bits") == 4) f.bits = 4;
    const bool odd_zeros = f.strategy == Strategy::kTensor && !f.symmetric;
    if ((f.strategy == Strategy::kBlock || odd_zeros) && odd.empty())
      odd = fmt::format("{}.strategy {}", weights, dump_json(field(w, "strategy")));
  } else if (format == "int-quantized" || (format == "naive-quantized" && type == "int")) {
    f.layout = Layout::kInt8;
    demand(w, "type", {"int"}, weights, &odd);
    demand(w, "num_bits", {8}, weights, &odd);
  } else if (format == "float-quantized" || format == "naive-quantized") {
    f.layout = Layout::kFloat8;
    demand(w, "type", {"float"}, weights, &odd);
    demand(w, "num_bits", {8}, weights, &odd);
    demand(w, "symmetric", {true, Json()}, weights, &odd);
  } else if (format == "mxfp8-quantized") {
    f = {.layout = Layout::kFloat8, .strategy = Strategy::kGroup, .group = 32};
    demand(w, "group_size", {32, Json()}, weights, &odd);
  } else if (format == "mxfp4-pack-quantized" || format == "nvfp4-pack-quantized") {
    const bool mx = format[0] == 'm';
    f = {
        .layout = mx ? Layout::kMxFp4 : Layout::kNvFp4, .bits = 4, .strategy = Strategy::kGroup, .group = mx ? 32 : 16};
    demand(w, "type", {"float"}, weights, &odd);
    demand(w, "num_bits", {4}, weights, &odd);
    demand(w, "group_size", {f.group, Json()}, weights, &odd);
  } else if (odd.empty()) {
    odd = fmt::format("format '{}'", format);
  }
  if (f.strategy == Strategy::kGroup && f.group == 0 && odd.empty()) {
    MI_TRY(f.group, positive(w, "group_size", what + ": " + weights));
  }
  if (f.strategy == Strategy::kBlock && odd.empty())
    MI_TRY_VOID(read_block(w, "block_structure", what + ": " + weights, &f));
  MI_TRY_VOID(check_activations(x, what + ": " + at + ".input_activations"));
  if (field(x, "num_bits") == 8 && field(x, "type") == "int") {
    f.int8_activations = true;
    f.static_activations = field(x, "dynamic") == false;
    f.asymmetric_activations = field(x, "symmetric") == false;
  }
  if (unsupported_.empty() && !odd.empty())
    unsupported_ = fmt::format("quant_method 'compressed-tensors' with {}", odd);
  out->format = f;
  return {};
}

Status QuantScheme::read_compressed_tensors(const Json& q, const std::string& what) {
  MI_TRY(const std::string format, json_get<std::string>(q, "format", what));
  MI_TRY(const auto ignore, json_get_or<std::vector<std::string>>(q, "ignore", {}, what));
  for (const std::string& p : ignore) {
    MI_TRY(Pattern pattern, read_pattern(p, what + ": ignore"));
    ignore_.push_back(std::move(pattern));
  }
  const Json groups = field(q, "config_groups");
  if (!groups.is_object() || groups.empty()) return bad_input("{}: config_groups is missing", what);
  for (const auto& [name, g] : groups.items()) {
    Group group;
    MI_TRY_VOID(read_group(g, format, fmt::format("config_groups.{}", name), what, &group));
    groups_.push_back(std::move(group));
  }
  std::string odd;
  demand(q, "transform_config", {Json()}, "quantization_config", &odd);
  const Json sparsity = field(q, "sparsity_config");
  if (!is_empty(sparsity) && field(sparsity, "format") != "dense" && odd.empty())
    odd = "sparsity_config " + dump_json(sparsity);
  demand(q, "quantization_status", {"compressed", Json()}, "quantization_config", &odd);
  if (unsupported_.empty() && !odd.empty())
    unsupported_ = fmt::format("quant_method 'compressed-tensors' with {}", odd);
  if (!is_empty(field(q, "kv_cache_scheme")))
    notes_.push_back("kv_cache_scheme is not followed: 'build' decides how keys and values are kept");
  return {};
}

Status QuantScheme::read_modelopt(const Json& q, const std::string& what) {
  MI_TRY(const std::string algo, json_get<std::string>(q, "quant_algo", what));
  if (algo == "NVFP4")
    add_everything({.layout = Layout::kNvFp4ModelOpt, .bits = 4, .strategy = Strategy::kGroup, .group = 16});
  else if (algo == "FP8")
    add_everything({.layout = Layout::kFloat8, .strategy = Strategy::kTensor});
  else
    unsupported_ = fmt::format("quant_method 'modelopt' with quant_algo '{}'", algo);
  return {};
}

Status QuantScheme::read_fp8(const Json& q, const std::string& what) {
  Format f{.layout = Layout::kFloat8, .strategy = Strategy::kTensor};
  if (!field(q, "weight_block_size").is_null())
    MI_TRY_VOID(read_block(q, "weight_block_size", what, &f));
  if (method_ == "mxfp8" && f.strategy == Strategy::kBlock && (f.block_rows != 1 || f.block_cols != 32))
    return bad_input("{}: weight_block_size is [{}, {}], but MXFP8 has a scale for [1, 32]; correct it", what, f.block_rows, f.block_cols);
  if (method_ == "mxfp8" && f.strategy == Strategy::kTensor)
    f = {.layout = Layout::kFloat8, .strategy = Strategy::kBlock, .block_rows = 1, .block_cols = 32};
  std::string odd;
  demand(q, "fmt", {"e4m3", "float8_e4m3fn", Json()}, "quantization_config", &odd);
  if (!odd.empty()) unsupported_ = fmt::format("quant_method '{}' with {}", method_, odd);
  add_everything(f);
  return {};
}

Status QuantScheme::read_gptq(const Json& q, const std::string& what) {
  Format f{.layout = Layout::kGptq};
  std::string odd;
  const std::string top = "quantization_config";
  // GPTQModel's newer key is `format`; AutoGPTQ knew version 1 only and said nothing.
  const Json said = field(q, "checkpoint_format").is_null() ? field(q, "format") : field(q, "checkpoint_format");
  if (!said.is_null() && said != "gptq" && said != "gptq_v2") odd = "checkpoint_format " + dump_json(said);
  f.zero_minus_one = said != "gptq_v2";
  demand(q, "bits", {2, 4, 8}, top, &odd);
  demand(q, "pack_dtype", {"int32", Json()}, top, &odd);
  if (odd.empty()) {
    f.bits = q["bits"].get<int>();
    MI_TRY_VOID(read_group_size(q, what, &f));
    MI_TRY(f.group_index, json_get_or<bool>(q, "desc_act", false, what));
    MI_TRY(f.symmetric, json_get_or<bool>(q, "sym", true, what));
  }
  // Modules with settings of their own: "+:regex" or "regex", or left in float: "-:regex".
  const Json dynamic = field(q, "dynamic");
  if (odd.empty() && dynamic.is_object())
    for (const auto& [key, own] : dynamic.items()) {
      const bool prefixed = key.starts_with("+:") || key.starts_with("-:");
      Group g;
      MI_TRY(Pattern p, read_pattern("re:" + key.substr(prefixed ? 2 : 0), what + ": dynamic"));
      g.targets.push_back(std::move(p));
      if (!key.starts_with("-:")) {
        g.format = f;
        std::string strange;
        demand(own, "bits", {2, 4, 8, Json()}, "dynamic." + key, &strange);
        if (!strange.empty() && odd.empty()) odd = strange;
        if (strange.empty() && !field(own, "bits").is_null()) g.format->bits = own["bits"].get<int>();
        if (!field(own, "group_size").is_null())
          MI_TRY_VOID(read_group_size(own, what + ": dynamic: " + key, &*g.format));
      }
      groups_.push_back(std::move(g));
    }
  if (!odd.empty()) unsupported_ = fmt::format("quant_method 'gptq' with {}", odd);
  add_everything(f);
  return {};
}

Status QuantScheme::read_awq(const Json& q, const std::string& what) {
  Format f{.layout = Layout::kAwq, .bits = 4, .symmetric = false};
  std::string odd;
  demand(q, "bits", {4}, "quantization_config", &odd);
  demand(q, "version", {"gemm", "GEMM", Json()}, "quantization_config", &odd);
  demand(q, "checkpoint_format", {"gemm", "GEMM", Json()}, "quantization_config", &odd);
  if (odd.empty()) MI_TRY_VOID(read_group_size(q, what, &f));
  if (!odd.empty()) unsupported_ = fmt::format("quant_method 'awq' with {}", odd);
  add_everything(f);
  return {};
}

Error QuantScheme::refuse() const {
  return bad_input("{}: {} is not supported yet; known are float checkpoints and {}: use such a release of the model",
                   path_, unsupported_, formats::known_formats_text());
}

Result<QuantScheme::Pattern> QuantScheme::read_pattern(const std::string& text, const std::string& what) {
  Pattern p{text, std::nullopt};
  if (ModulePattern::is_one(text)) {
    MI_TRY(p.rx, ModulePattern::read(text, what));
  }
  return p;
}

bool QuantScheme::matches(Pattern& p, const std::string& module) {
  const bool hit = p.rx ? p.rx->matches(module) : p.text == module;
  if (hit) ++p.matches;
  return hit;
}

const Format* QuantScheme::format_of(const std::string& module) {
  bool ignored = false;
  for (Pattern& p : ignore_) ignored = matches(p, module) || ignored;
  if (ignored) return nullptr;
  for (Group& g : groups_) {
    bool hit = false;
    for (Pattern& p : g.targets) hit = (p.text != "Linear" && matches(p, module)) || hit;
    if (hit) return g.format ? &*g.format : nullptr;
  }
  // The class name means every linear module, and the caller asks about nothing else; names go before it.
  for (Group& g : groups_)
    for (Pattern& p : g.targets)
      if (p.text == "Linear") {
        ++p.matches;
        return g.format ? &*g.format : nullptr;
      }
  return nullptr;
}

std::vector<std::string> QuantScheme::notes() const {
  std::vector<std::string> out = notes_;
  if (!is_strict()) return out;
  const auto count = [&](const char* kind, const Pattern& p) {
    out.push_back(
        fmt::format("{}quantization {} '{}': {} modules", p.matches ? "" : "warning: ", kind, p.text, p.matches));
  };
  for (const Group& g : groups_)
    for (const Pattern& p : g.targets) count("target", p);
  for (const Pattern& p : ignore_) count("ignore", p);
  return out;
}

}  // namespace mi::model
