#include "model/quant_scheme.h"

#include <algorithm>

namespace mi::model {
namespace {

const std::vector<std::string> kMethods = {"compressed-tensors", "fp8",          "mxfp8",      "mxfp4", "gptq", "awq",
                                           "modelopt",           "bitsandbytes", "fbgemm_fp8", "quark"};

Json field(const Json& j, const char* key) { return j.is_object() && j.contains(key) ? j[key] : Json(); }

// One demand per key: a value that differs from the only supported one is named.
Status demand(const Json& j, const char* key, const Json& only, const std::string& what, std::string* unsupported) {
  const Json v = field(j, key);
  const bool empty = v.is_null() || (v.is_object() && v.empty()) || (v.is_array() && v.empty());
  if (v == only || (only.is_null() && empty)) return {};
  if (unsupported->empty()) *unsupported = fmt::format("{}.{} {}", what, key, dump_json(v));
  return {};
}

bool is_nan_code(uint8_t b) { return (b & 0x7f) == 0x7f; }  // E4M3

// Where in a scale tensor the first value is that cannot be one; -1: nowhere.
int64_t bad_scale(const TensorView& v) {
  const int64_t n = v.count();
  if (v.dtype == DType::kU8 || v.dtype == DType::kF8E8M0) {
    for (int64_t i = 0; i < n; ++i)
      if (uint8_t(v.data[i]) == 255) return i;
  } else if (v.dtype == DType::kF8E4M3) {
    for (int64_t i = 0; i < n; ++i)
      if (is_nan_code(uint8_t(v.data[i]))) return i;
  } else if (v.dtype == DType::kF32 || v.dtype == DType::kBF16 || v.dtype == DType::kF16) {
    float f = 0;
    for (int64_t i = 0; i < n; ++i) {
      convert_to_f32(v.data + size_t(i) * dtype_bytes(v.dtype), v.dtype, &f, 1);
      if (!std::isfinite(f)) return i;
    }
  }
  return -1;
}

class Checker {
 public:
  Checker(const Checkpoint& k, const std::vector<int64_t>& block) : k_(k), block_(block) {}

  Status run() {
    for (const auto& entry : k_.tensors()) {
      const std::string& name = entry.first;  // no structured binding: the lambda captures it
      const Checkpoint::Tensor& t = entry.second;
      const auto cut = [&](std::string_view suffix) { return name.substr(0, name.size() - suffix.size()); };
      if (name.ends_with(".weight") && t.entry->dtype == DType::kF8E4M3)
        MI_TRY_VOID(fp8(t));
      else if (name.ends_with(".weight_packed"))
        MI_TRY_VOID(packed(t, cut("weight_packed") + "weight_scale"));
      else if (name.ends_with("_blocks"))
        MI_TRY_VOID(packed(t, cut("blocks") + "scales"));
      else if (name.ends_with(".qweight"))
        MI_TRY_VOID(qweight(t, cut("qweight")));
    }
    return {};
  }

 private:
  Result<const Checkpoint::Tensor*> sibling(const Checkpoint::Tensor& t, const std::string& name) {
    const Checkpoint::Tensor* s = k_.find(name);
    if (!s)
      return bad_input("{}: tensor {} is missing: {} is {} and needs it", t.path(), name, t.name(),
                       dtype_name(t.entry->dtype));
    return s;
  }
  Status scale_values(const Checkpoint::Tensor& s) {
    const int64_t at = bad_scale(s.view());
    if (at < 0) return {};
    return bad_input("{}: tensor {}: scale {} of {} is NaN or infinite (code 255 of E8M0 means NaN)", s.path(),
                     s.name(), at, s.view().count());
  }
  Status fp8(const Checkpoint::Tensor& t) {
    const bool inverse = k_.find(t.name() + "_scale_inv") || !k_.find(t.name() + "_scale");
    MI_TRY(const Checkpoint::Tensor* s, sibling(t, t.name() + (inverse ? "_scale_inv" : "_scale")));
    const Shape& w = t.entry->shape;
    if (inverse && block_.size() == 2 && w.size() == 2) {
      const Shape grid = {(w[0] + block_[0] - 1) / block_[0], (w[1] + block_[1] - 1) / block_[1]};
      if (s->entry->shape != grid)
        return bad_input("{}: tensor {} has shape {}, expected {}: {} in blocks of {}", s->path(), s->name(),
                         shape_text(s->entry->shape), shape_text(grid), shape_text(w), shape_text(block_));
    }
    MI_TRY_VOID(scale_values(*s));
    const TensorView v = t.view();
    for (size_t i = 0; i < v.bytes; ++i)
      if (is_nan_code(uint8_t(v.data[i]))) return bad_input("{}: tensor {}: value {} is NaN", t.path(), t.name(), i);
    return {};
  }
  Status packed(const Checkpoint::Tensor& t, const std::string& scale) {
    MI_TRY(const Checkpoint::Tensor* s, sibling(t, scale));
    if (t.entry->shape.empty() || s->entry->shape.empty() || t.entry->shape[0] != s->entry->shape[0])
      return bad_input("{}: tensor {} has shape {}, which does not fit {} {}", s->path(), s->name(),
                       shape_text(s->entry->shape), t.name(), shape_text(t.entry->shape));
    return scale_values(*s);
  }
  Status qweight(const Checkpoint::Tensor& t, const std::string& base) {
    MI_TRY(const Checkpoint::Tensor* scales, sibling(t, base + "scales"));
    MI_TRY_VOID(sibling(t, base + "qzeros").ok() ? Status() : Status(sibling(t, base + "qzeros").error()));
    MI_TRY_VOID(scale_values(*scales));
    if (scales->entry->shape.size() != 2)
      return bad_input("{}: tensor {} has shape {}, expected [groups, out]", scales->path(), scales->name(),
                       shape_text(scales->entry->shape));
    const Checkpoint::Tensor* index = k_.find(base + "g_idx");
    if (!index) return {};
    if (index->entry->dtype != DType::kI32)
      return bad_input("{}: tensor {} is {}, expected I32", index->path(), index->name(),
                       dtype_name(index->entry->dtype));
    const TensorView v = index->view();
    for (int64_t i = 0; i < v.count(); ++i) {
      int32_t g = 0;
      std::memcpy(&g, v.data + i * 4, 4);
      if (g < 0 || g >= scales->entry->shape[0])
        return bad_input("{}: tensor {}: input {} belongs to group {}, but there are only {} groups", index->path(),
                         index->name(), i, g, scales->entry->shape[0]);
    }
    return {};
  }

  const Checkpoint& k_;
  const std::vector<int64_t>& block_;
};

}  // namespace

Result<std::optional<QuantScheme>> QuantScheme::read(Config& c) {
  std::string source;
  MI_TRY(const Json q, c.raw("quantization_config", &source));
  if (source.empty()) return std::optional<QuantScheme>();
  const std::string what = c.path() + ": " + source;
  QuantScheme s;
  s.path_ = what;
  MI_TRY(s.method_, json_get<std::string>(q, "quant_method", what));
  if (std::find(kMethods.begin(), kMethods.end(), s.method_) == kMethods.end()) {
    const std::string near = nearest_name(s.method_, kMethods);
    return bad_input("{}: quant_method '{}' is not known{}; known are {}", what, s.method_,
                     near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near), fmt::join(kMethods, ", "));
  }
  if (s.method_ == "compressed-tensors") {
    MI_TRY_VOID(s.read_compressed_tensors(q, what));
    return std::optional(std::move(s));
  }
  s.unsupported_ = fmt::format("quant_method '{}'", s.method_);
  if (!field(q, "weight_block_size").is_null()) {
    MI_TRY(s.block_, json_get<std::vector<int64_t>>(q, "weight_block_size", what));
    if (s.block_.size() != 2 || s.block_[0] < 1 || s.block_[1] < 1)
      return bad_input("{}: weight_block_size: expected two sizes", what);
  }
  return std::optional(std::move(s));
}

Status QuantScheme::read_compressed_tensors(const Json& q, const std::string& what) {
  MI_TRY(const std::string format, json_get<std::string>(q, "format", what));
  if (format != "int-quantized")
    unsupported_ = fmt::format("quant_method 'compressed-tensors' with format '{}'", format);
  MI_TRY(const auto ignore, json_get_or<std::vector<std::string>>(q, "ignore", {}, what));
  for (const std::string& p : ignore) {
    MI_TRY(Pattern pattern, read_pattern(p, what + ": ignore"));
    ignore_.push_back(std::move(pattern));
  }
  const Json groups = field(q, "config_groups");
  if (!groups.is_object() || groups.empty()) return bad_input("{}: config_groups is missing", what);
  std::string odd;
  for (const auto& [name, g] : groups.items()) {
    const std::string at = fmt::format("config_groups.{}", name);
    MI_TRY(const auto targets, json_get<std::vector<std::string>>(g, "targets", what + ": " + at));
    for (const std::string& p : targets) {
      MI_TRY(Pattern pattern, read_pattern(p, what + ": " + at + ".targets"));
      targets_.push_back(std::move(pattern));
    }
    const Json w = field(g, "weights"), x = field(g, "input_activations");
    const std::pair<const char*, Json> weights[] = {
        {"num_bits", 8},    {"type", "int"},    {"strategy", "channel"}, {"symmetric", true},
        {"dynamic", false}, {"group_size", {}}, {"block_structure", {}}, {"actorder", {}}};
    const std::pair<const char*, Json> inputs[] = {
        {"num_bits", 8}, {"type", "int"}, {"strategy", "token"}, {"symmetric", true}, {"dynamic", true}};
    for (const auto& [key, only] : weights) MI_TRY_VOID(demand(w, key, only, at + ".weights", &odd));
    for (const auto& [key, only] : inputs) MI_TRY_VOID(demand(x, key, only, at + ".input_activations", &odd));
    MI_TRY_VOID(demand(g, "output_activations", Json(), at, &odd));
    const Json own = field(g, "format");
    if (!own.is_null() && own != format && odd.empty()) odd = fmt::format("{}.format {}", at, dump_json(own));
  }
  for (const char* key : {"kv_cache_scheme", "transform_config"})
    MI_TRY_VOID(demand(q, key, Json(), "quantization_config", &odd));
  const Json sparsity = field(q, "sparsity_config");
  if (sparsity.is_object() && !sparsity.empty() && field(sparsity, "format") != "dense" && odd.empty())
    odd = "sparsity_config " + dump_json(sparsity);
  const Json status = field(q, "quantization_status");
  if (!status.is_null() && status != "compressed" && odd.empty()) odd = "quantization_status " + dump_json(status);
  if (unsupported_.empty() && !odd.empty())
    unsupported_ = fmt::format(
        "quant_method 'compressed-tensors' with {} (supported: int8 weights per channel, int8 activations dynamic per "
        "token, both symmetric)",
        odd);
  return {};
}

Status QuantScheme::check_tensors(const Checkpoint& k) const { return Checker(k, block_).run(); }

Error QuantScheme::refuse(const Checkpoint& k) const {
  if (auto s = check_tensors(k); !s.ok()) return s.error();
  return bad_input(
      "{}: {} is not supported yet; export takes float checkpoints and compressed-tensors int-quantized (W8A8) ones: "
      "use such a release of the model",
      path_, unsupported_);
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

bool QuantScheme::is_ignored(const std::string& module) {
  bool hit = false;
  for (Pattern& p : ignore_) hit = matches(p, module) || hit;
  return hit;
}

bool QuantScheme::is_targeted(const std::string& module) {
  bool hit = false;
  for (Pattern& p : targets_) {
    // The class name means every linear module; the caller asks about nothing else.
    if (p.text == "Linear") {
      ++p.matches;
      hit = true;
    } else {
      hit = matches(p, module) || hit;
    }
  }
  return hit;
}

std::vector<std::string> QuantScheme::notes() const {
  std::vector<std::string> out;
  for (const Pattern& p : targets_)
    out.push_back(
        fmt::format("{}quantization target '{}': {} modules", p.matches ? "" : "warning: ", p.text, p.matches));
  for (const Pattern& p : ignore_)
    out.push_back(
        fmt::format("{}quantization ignore '{}': {} modules", p.matches ? "" : "warning: ", p.text, p.matches));
  return out;
}

}  // namespace mi::model
