#include "model/arch.h"

#include <cmath>
#include <set>

#include "model/pattern.h"

namespace mi::model {
namespace {

constexpr int64_t kMaxSize = int64_t(1) << 31;  // products of two sizes fit
constexpr int64_t kMaxHeadDim = 65536, kMaxExperts = 65536;

// nullopt also for an integer that int64 does not hold.
std::optional<int64_t> as_int64(const Json& v) {
  if (!v.is_number_integer() || (v.is_number_unsigned() && v.get<uint64_t>() > uint64_t(INT64_MAX)))
    return std::nullopt;
  return v.get<int64_t>();
}

// Typed reads of a recipe section. The first error sticks; what is read after it is a default.
class Fields {
 public:
  Fields(const Recipe& r, const std::string& section, Config& c)
      : j_(r.section(section)), c_(c), what_(r.file + ": " + section) {}

  // A constant, $name or $(expression).
  Json get(const std::string& key, const Json& fallback) {
    asked_.insert(key);
    Json v = j_.contains(key) ? j_[key] : fallback;
    if (error_ || !v.is_string()) return v;
    const std::string s = v.get<std::string>();
    if (s.size() < 2 || s[0] != '$') return v;
    if (s[1] == '(') {
      auto r = c_.eval(s.substr(1));
      if (r.ok()) return *r;
      return stop(r.error());
    }
    auto r = c_.value(s.substr(1));
    if (r.ok()) return *r;
    return stop(r.error());
  }
  // The rule list or mapping under key, as written.
  Json written(const std::string& key, const Json& fallback) {
    asked_.insert(key);
    return j_.contains(key) ? j_[key] : fallback;
  }
  int64_t integer(const std::string& key, const Json& fallback) {
    const Json v = get(key, fallback);
    if (v.is_null()) return 0;
    if (const auto i = as_int64(v); i && *i >= -kMaxSize && *i <= kMaxSize) return *i;
    wrong(key, "an integer up to 2^31");
    return 0;
  }
  float number(const std::string& key, const Json& fallback) {
    const Json v = get(key, fallback);
    if (v.is_number() && std::isfinite(v.get<float>())) return v.get<float>();
    if (v.is_null()) return 0;
    wrong(key, "a number");
    return 0;
  }
  bool flag(const std::string& key, const Json& fallback) {
    const Json v = get(key, fallback);
    if (v.is_boolean()) return v.get<bool>();
    wrong(key, "true or false");
    return false;
  }
  std::string word(const std::string& key, const Json& fallback, const std::vector<std::string>& known) {
    const Json v = get(key, fallback);
    const std::string s = v.is_string() ? v.get<std::string>() : "";
    if (std::find(known.begin(), known.end(), s) == known.end()) {
      // A value out of the config is the file's fault, not the recipe's.
      const Json w = j_.contains(key) ? j_[key] : fallback;
      const bool from_config = w.is_string() && w.get<std::string>().starts_with("$");
      if (!error_)
        error_ = bad_input("{}: '{}' is not supported; known are {}",
                           from_config ? c_.spelled(w.get<std::string>().substr(1)) : what_ + ": " + key, s,
                           fmt::join(known, ", "));
    }
    return s;
  }
  std::vector<bool> layers(const std::string& key, const Json& fallback, int64_t n, const std::string& meaning) {
    const Json rules = written(key, fallback);
    std::vector<bool> in(size_t(n), false);
    if (error_) return in;
    auto r = resolve_layers(rules, n, c_, meaning);
    if (!r.ok())
      error_ = r.error();
    else
      in = *r;
    return in;
  }
  Status finish() {
    if (error_) return *error_;
    return refuse_unknown_keys(j_, {asked_.begin(), asked_.end()}, what_);
  }

 private:
  Json stop(const Error& e) {
    if (!error_) error_ = e;
    return Json();
  }
  void wrong(const std::string& key, const char* expected) {
    if (!error_) error_ = bad_input("{}: {}: expected {}", what_, key, expected);
  }

  const Json& j_;
  Config& c_;
  std::string what_;
  std::set<std::string> asked_;
  std::optional<Error> error_;
};

Status check_required(const Recipe& r, Config& c) {
  for (const auto& [path, allowed] : r.require) {
    std::string source;
    MI_TRY(const Json v, c.raw(path, &source));
    if (source.empty() || std::find(allowed.begin(), allowed.end(), v) != allowed.end()) continue;
    std::vector<std::string> known;
    for (const Json& a : allowed) known.push_back(dump_json(a));
    return bad_input("{}: {} is {}; for {} only {} is supported", c.path(), source, dump_json(v), r.family,
                     fmt::join(known, " or "));
  }
  return {};
}

Status read_attention(const Recipe& r, Config& c, ArchSpec* a) {
  Fields f(r, "attention", c);
  ArchSpec::Attention& t = a->attention;
  const std::string kind = f.word("kind", "gqa", {"gqa", "mla"});
  t.heads = f.integer("heads", "$heads");
  t.kv_heads = f.integer("kv_heads", "$kv_heads");
  t.head_dim = f.integer("head_dim", "$head_dim");
  t.v_dim = f.integer("v_dim", t.head_dim);
  t.bias_q = f.flag("bias_q", false);
  t.bias_k = f.flag("bias_k", false);
  t.bias_v = f.flag("bias_v", false);
  t.bias_o = f.flag("bias_o", false);
  const std::string norm = f.word("qk_norm", "none", {"none", "per_head", "full"});
  const bool has_norm = f.flag("qk_norm_if", true);
  t.qk_norm = !has_norm || norm == "none" ? QkNorm::kNone : norm == "full" ? QkNorm::kFull : QkNorm::kPerHead;
  t.norm_after_rope = f.flag("qk_norm_after_rope", false);
  t.clip = f.number("clip", Json());
  const Json scale = f.get("scale", Json());
  t.softcap = f.number("softcap", 0);
  t.sinks = f.flag("sinks", false);
  MI_TRY_VOID(f.finish());
  if (kind == "mla") return bad_input("{}.yaml: attention kind 'mla' is not supported yet", r.family);
  if (!scale.is_null() && !scale.is_number())
    return bad_input("{}.yaml: attention: scale: expected a number", r.family);
  if (t.head_dim > kMaxHeadDim)
    return bad_input("{} is {}, more than the limit of {}", c.spelled("head_dim"), t.head_dim, kMaxHeadDim);
  if (t.heads < 1 || t.kv_heads < 1 || t.head_dim < 1 || t.v_dim < 1)
    return bad_input("{}: attention needs heads and a head size above 0", c.path());
  t.scale = scale.is_null() ? float(1.0 / std::sqrt(double(t.head_dim))) : scale.get<float>();
  if (t.heads % t.kv_heads != 0)
    return bad_input("{} is {}, no multiple of {} key-value heads", c.spelled("heads"), t.heads, t.kv_heads);
  return {};
}

Status read_rope(const Recipe& r, Config& c, ArchSpec* a) {
  Fields f(r, "rope", c);
  RopeRequest q;
  q.style = f.word("style", "half", {"half", "interleaved", "none"});
  q.theta = f.number("theta", 10000.0);
  q.partial = f.number("partial", 1.0);
  q.check_rotary_dim = f.word("rotary_dim", "use", {"use", "check"}) == "check";
  q.default_scaling = f.written("default_scaling", Json());
  q.head_dim = a->attention.head_dim;
  q.max_positions = a->max_positions;
  const std::vector<bool> rotated = f.layers("layers", q.style == "none" ? "none" : "all", a->layers, "rope.layers");
  MI_TRY_VOID(f.finish());
  if (std::find(rotated.begin(), rotated.end(), true) != rotated.end()) {
    MI_TRY(a->ropes, resolve_rope(q, c));
  }
  // Ropes keyed by layer type need the type of each layer.
  Json types;
  if (a->ropes.size() > 1) {
    MI_TRY(types, c.value("layer_types"));
    if (!types.is_array() || int64_t(types.size()) != a->layers)
      return bad_input(
          "{}: rope_parameters is given per layer type, but layer_types does not name one for each of {} layers",
          c.path(), a->layers);
  }
  for (int64_t l = 0; l < a->layers; ++l) {
    int rope = rotated[size_t(l)] ? 0 : -1;
    if (rope == 0 && a->ropes.size() > 1) {
      rope = -1;
      for (size_t i = 0; i < a->ropes.size(); ++i)
        if (types[size_t(l)] == a->ropes[i].layer_type) rope = int(i);
      if (rope < 0)
        return bad_input("{}: rope_parameters has no entry for layer type {}", c.path(), dump_json(types[size_t(l)]));
    }
    a->layer[size_t(l)].rope = rope;
  }
  return {};
}

Status read_window(const Recipe& r, Config& c, ArchSpec* a) {
  Fields f(r, "window", c);
  const int64_t size = f.integer("size", Json());
  const bool on = f.flag("if", true);
  const Json rules = f.written("layers", "all");
  MI_TRY_VOID(f.finish());
  if (size < 0) return bad_input("{}: the sliding window is {}", c.path(), size);
  if (size == 0 || !on) return {};
  MI_TRY(const std::vector<bool> in, resolve_layers(rules, a->layers, c, "window.layers"));
  for (int64_t l = 0; l < a->layers; ++l) a->layer[size_t(l)].window = in[size_t(l)] ? size : 0;
  return {};
}

Status read_index(const Recipe& r, Config& c, ArchSpec* a) {
  if (r.section("index").empty()) return {};
  Fields f(r, "index", c);
  const bool on = f.flag("if", true);
  const std::vector<bool> in =
      on ? f.layers("layers", "none", a->layers, "index.layers") : std::vector<bool>(size_t(a->layers), false);
  f.written("layers", Json());
  const bool any = std::find(in.begin(), in.end(), true) != in.end();
  for (const char* k : {"heads", "dim", "block", "topk", "local"}) f.written(k, Json());
  if (any) {
    a->index.heads = f.integer("heads", Json());
    a->index.dim = f.integer("dim", Json());
    a->index.block = f.integer("block", Json());
    a->index.topk = f.integer("topk", Json());
    a->index.local = f.integer("local", 1);
  }
  MI_TRY_VOID(f.finish());
  for (int64_t l = 0; l < a->layers; ++l) a->layer[size_t(l)].indexed = in[size_t(l)];
  if (any && a->index.heads != a->attention.kv_heads)
    return bad_input("{} is {}, but there are {} key-value heads: one index head selects for each",
                     c.spelled("index_heads"), a->index.heads, a->attention.kv_heads);
  if (any && a->index.local > a->index.topk)
    return bad_input("{}: {} local blocks are more than the {} blocks kept", c.path(), a->index.local, a->index.topk);
  return {};
}

Status read_activation(const Recipe& r, Config& c, ArchSpec* a) {
  Fields f(r, "activation", c);
  const std::string kind =
      f.word("kind", "$hidden_act", {"silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "swiglu_oai"});
  a->activation.alpha = f.number("alpha", ActivationParams{}.alpha);
  a->activation.limit = f.number("limit", 0);
  MI_TRY_VOID(f.finish());
  a->activation.kind = kind == "gelu"              ? ActKind::kGelu
                       : kind == "relu"            ? ActKind::kRelu
                       : kind == "swiglu_oai"      ? ActKind::kSwigluOai
                       : kind.starts_with("gelu_") ? ActKind::kGeluTanh
                                                   : ActKind::kSilu;
  if (a->activation.kind == ActKind::kSwigluOai && a->activation.limit <= 0)
    return bad_input("{}: the limit of swiglu_oai is {}", c.path(), a->activation.limit);
  if (a->activation.kind != ActKind::kSwigluOai) a->activation = ActivationParams{a->activation.kind};
  return {};
}

Status check_route(Config& c, const RouteParams& p) {
  if (p.experts > kMaxExperts)
    return bad_input("{} is {}, more than the limit of {}", c.spelled("experts"), p.experts, kMaxExperts);
  if (p.k > p.experts)
    return bad_input("{} is {}, but there are only {} experts ({})", c.spelled("k"), p.k, p.experts,
                     c.spelled("experts"));
  if (p.groups < 1 || p.experts % p.groups != 0)
    return bad_input("{}: {} experts do not divide into {} groups", c.path(), p.experts, p.groups);
  if (p.groups_keep < 1 || p.groups_keep > p.groups)
    return bad_input("{}: {} of {} expert groups cannot be kept", c.path(), p.groups_keep, p.groups);
  if (p.groups_keep * (p.experts / p.groups) < p.k)
    return bad_input("{} is {}, but the {} kept groups hold only {} experts", c.spelled("k"), p.k, p.groups_keep,
                     p.groups_keep * (p.experts / p.groups));
  return {};
}

Status read_moe(const Recipe& r, Config& c, ArchSpec* a) {
  if (r.section("moe").empty()) return {};
  Fields f(r, "moe", c);
  const std::vector<bool> in = f.layers("layers", "all", a->layers, "moe.layers");
  RouteParams& p = a->moe.route;
  p.experts = f.integer("experts", "$experts");
  p.k = f.integer("k", "$k");
  const std::string score = f.word("score", Json(), {"softmax", "sigmoid", "none"});
  p.score = score == "softmax" ? RouteScore::kSoftmax : score == "sigmoid" ? RouteScore::kSigmoid : RouteScore::kNone;
  p.softmax_after = f.flag("softmax_after", false);
  p.renorm = f.flag("renorm", false);
  p.renorm_eps = f.number("renorm_eps", 0);
  p.renorm_min = f.number("renorm_min", 0);
  p.scale = f.number("scale", 1.0);
  p.groups = f.integer("groups", 1);
  p.groups_keep = f.integer("groups_keep", 1);
  p.group_by = f.word("group_by", "top2", {"top2", "max"}) == "max" ? GroupBy::kMax : GroupBy::kTop2;
  p.group_fill_zero = f.word("group_fill", "-inf", {"-inf", "zero"}) == "zero";
  a->moe.width = f.integer("width", "$expert_width");
  a->moe.router_bias = f.flag("router_bias", false);
  a->moe.select_bias = f.flag("select_bias", false);
  a->moe.expert_bias = f.flag("expert_bias", false);
  a->moe.shared_width = f.integer("shared_width", 0);
  a->moe.shared_gate =
      f.word("shared_gate", "none", {"none", "sigmoid"}) == "sigmoid" ? SharedGate::kSigmoid : SharedGate::kNone;
  a->moe.shared_bias = f.flag("shared_bias", false);
  MI_TRY_VOID(f.finish());
  if (!p.renorm) p.renorm_eps = p.renorm_min = 0;
  for (int64_t l = 0; l < a->layers; ++l) a->layer[size_t(l)].moe = in[size_t(l)];
  return check_route(c, p);
}

Result<std::vector<int64_t>> ids(const Json& v, const std::string& what) {
  std::vector<int64_t> out;
  if (v.is_null()) return out;
  for (const Json& e : v.is_array() ? v : Json::array({v})) {
    const auto id = as_int64(e);
    if (!id) return bad_input("{}: expected a token id or a list of them", what);
    out.push_back(*id);
  }
  return out;
}

}  // namespace

Result<ArchSpec> resolve_arch(const Recipe& r, Config& c) {
  ArchSpec a;
  a.family = r.family;
  MI_TRY_VOID(check_required(r, c));
  MI_TRY(a.hidden, c.eval("hidden"));
  MI_TRY(a.layers, c.eval("layers"));
  MI_TRY(a.vocab, c.eval("vocab"));
  MI_TRY(a.max_positions, c.eval("max_positions"));
  if (a.layers > 10000) return bad_input("{} is {}, more than the limit of 10000", c.spelled("layers"), a.layers);
  a.layer.resize(size_t(a.layers));

  Fields norm(r, "norm", c);
  a.eps = norm.number("eps", "$eps");
  if (!(a.eps >= 0 && a.eps < 1)) return bad_input("{} is {}, expected a number from 0 to 1", c.spelled("eps"), a.eps);
  a.plus_one = norm.flag("plus_one", false);
  MI_TRY_VOID(norm.finish());
  MI_TRY_VOID(read_attention(r, c, &a));
  MI_TRY_VOID(read_rope(r, c, &a));
  MI_TRY_VOID(read_window(r, c, &a));
  MI_TRY_VOID(read_index(r, c, &a));
  MI_TRY_VOID(read_activation(r, c, &a));
  MI_TRY_VOID(read_moe(r, c, &a));
  Fields mlp(r, "mlp", c);
  mlp.written("width", Json());
  const bool any_dense = std::any_of(a.layer.begin(), a.layer.end(), [](const LayerSpec& l) { return !l.moe; });
  if (any_dense) a.mlp.width = mlp.integer("width", "$dense_width");
  a.mlp.bias = mlp.flag("bias", false);
  MI_TRY_VOID(mlp.finish());

  Fields scalars(r, "scalars", c);
  a.embed_scale = scalars.number("embed", 1.0);
  a.residual_scale = scalars.number("residual", 1.0);
  a.logits_scale = scalars.number("logits", 1.0);
  const float divisor = scalars.number("logits_divisor", 1.0);
  MI_TRY_VOID(scalars.finish());
  if (divisor == 0) return bad_input("{}: logits are divided by 0", c.path());
  if (divisor != 1) a.logits_scale /= divisor;

  MI_TRY(const Json tied, c.value("tied"));
  MI_TRY(const bool tied_given, c.is_given("tied"));
  a.tied_by_default = tied.is_boolean() && tied.get<bool>();
  a.tied = !tied_given ? ArchSpec::Tied::kUnsaid : a.tied_by_default ? ArchSpec::Tied::kYes : ArchSpec::Tied::kNo;
  MI_TRY(const Json dtype, c.value("dtype"));
  a.dtype = dtype.is_string() ? dtype.get<std::string>() : "";
  MI_TRY(const Json eos, c.value("eos"));
  MI_TRY(a.eos_ids, ids(eos, c.spelled("eos")));
  MI_TRY(const Json bos, c.value("bos"));
  MI_TRY(const Json pad, c.value("pad"));
  a.bos_id = as_int64(bos).value_or(-1);
  a.pad_id = as_int64(pad).value_or(-1);
  return a;
}

}  // namespace mi::model
