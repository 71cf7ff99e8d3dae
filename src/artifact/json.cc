#include "artifact/json.h"

#include <limits>

#include "tensor/op_fields.h"

namespace mi::artifact {
namespace {

constexpr std::pair<Packing, std::string_view> kPackings[] = {{Packing::kPlain, "plain"},
                                                              {Packing::kPackedF32, "packed_f32"},
                                                              {Packing::kPackedBF16, "packed_bf16"},
                                                              {Packing::kPackedI8, "packed_i8"},
                                                              {Packing::kPackedI4, "packed_i4"}};

// ---- fields: each struct lists its fields once, for both directions ----
// A field that v gets with a third argument is left out when it equals that default and may be absent.

template <class S, class V>
void fields(S& s, V&& v) requires std::is_same_v<std::remove_const_t<S>, ModelFacts> {
  v("name", s.name);
  v("family", s.family);
  v("model_type", s.model_type);
  v("vocab", s.vocab);
  v("hidden", s.hidden);
  v("layers", s.layers);
  v("max_positions", s.max_positions);
  v("eos_ids", s.eos_ids);
  v("bos_id", s.bos_id);
  v("pad_id", s.pad_id);
  v("total_params", s.total_params);
  v("active_params", s.active_params);
  v("max_k", s.max_k);
  v("precision", s.precision);
}
template <class S, class V>
void fields(S& s, V&& v) requires std::is_same_v<std::remove_const_t<S>, MemoryPlan> {
  v("weight_bytes", s.weight_bytes);
  v("activation_bytes_per_token", s.activation_bytes_per_token);
  v("kv_bytes_per_token_bf16", s.kv_bytes_per_token_bf16);
}
template <class S, class V>
void fields(S& s, V&& v) requires std::is_same_v<std::remove_const_t<S>, PassReport> {
  v("name", s.name);
  v("skipped", s.skipped);
  v("changed", s.changed);
  v("nodes_before", s.nodes_before);
  v("nodes_after", s.nodes_after);
}
template <class S, class V>
void fields(S& s, V&& v) requires std::is_same_v<std::remove_const_t<S>, Fallback> {
  v("where", s.where);
  v("what", s.what);
  v("why", s.why);
  v("fix", s.fix);
}
template <class S, class V>
void fields(S& s, V&& v) requires std::is_same_v<std::remove_const_t<S>, Segment> {
  v("offset", s.offset);
  v("bytes", s.bytes);
  v("xxh3", s.xxh3);
}
template <class S, class V>
void fields(S& s, V&& v) requires std::is_same_v<std::remove_const_t<S>, WeightTensor> {
  v("name", s.name);
  v("packing", s.packing);
  v("dtype", s.dtype);
  v("experts", s.experts, int64_t(1));
  v("n", s.n);
  v("k", s.k);
  v("n_pad", s.n_pad);
  v("k_pad", s.k_pad);
  v("offset", s.offset);
  v("bytes", s.bytes);
  v("expert_stride", s.expert_stride);
  v("scale_offset", s.scale_offset, int64_t(0));
  v("colsum_offset", s.colsum_offset, int64_t(0));
  v("group", s.group, int64_t(0));
  v("scale_dtype", s.scale_dtype, DType::kF32);
  v("expert_slots", s.expert_slots, std::vector<int32_t>());
}
template <class S, class V>
void fields(S& s, V&& v) requires std::is_same_v<std::remove_const_t<S>, Buffer> {
  v("name", s.name);
  v("rows", s.type.rows);
  v("cols", s.type.cols);
  v("elem", s.type.elem);
  v("row_stride", s.row_stride);
  v("rows_per_token", s.rows_per_token, int64_t(1));
  v("offset_per_token", s.offset_per_token);
  v("first_instr", s.first_instr);
  v("last_instr", s.last_instr);
}
template <class S, class V>
void fields(S& s, V&& v) requires std::is_same_v<std::remove_const_t<S>, Operand> {
  v("buffer", s.buffer, -1);
  v("col", s.col, int64_t(0));
  v("rows", s.type.rows, Rows::kToken);
  v("cols", s.type.cols, int64_t(0));
  v("elem", s.type.elem, Elem::kF32);
}
template <class S, class V>
void fields(S& s, V&& v) requires std::is_same_v<std::remove_const_t<S>, InstrWeight> {
  v("role", s.role);
  v("tensor", s.tensor);
}
template <class S, class V>
void fields(S& s, V&& v) requires std::is_same_v<std::remove_const_t<S>, Instr> {
  v("op", s.op);
  v("name", s.name);
  v("layer", s.layer, -1);
  v("in", s.in);
  v("out", s.out);
  v("residual", s.residual, -1);
  v("scratch", s.scratch, -1);
  v("weights", s.weights);
  v("params", s.params);
  v("groups", s.groups, std::vector<std::vector<int32_t>>());
  v("layer_output", s.layer_output, false);
}
template <class S, class V>
void fields(S& s, V&& v) requires std::is_same_v<std::remove_const_t<S>, LayerCache> {
  v("kv_heads", s.kv_heads);
  v("k_dim", s.k_dim);
  v("v_dim", s.v_dim);
  v("index_dim", s.index_dim, int64_t(0));
  v("window", s.window, int64_t(0));
}
template <class S, class V>
void fields(S& s, V&& v) requires std::is_same_v<std::remove_const_t<S>, Manifest> {
  v("format_version", s.format_version);
  v("tool_version", s.tool_version);
  v("target", s.target);
  v("default_kv", s.default_kv);
  v("model", s.model);
  v("memory", s.memory);
  v("options", s.options);
  v("passes", s.passes);
  v("fallbacks", s.fallbacks);
  v("segments", s.segments);
  v("caches", s.caches);
  v("weights", s.weights);
  v("buffers", s.buffers);
  v("program", s.program);
}

// ---- writing ----
template <class S>
Json write(const S& s);  // a struct
Json write(const std::string& v) { return v; }
Json write(bool v) { return v; }
Json write(int32_t v) { return v; }
Json write(int64_t v) { return v; }
Json write(Packing v) { return std::string(packing_name(v)); }
Json write(DType v) { return std::string(dtype_name(v)); }
Json write(Rows v) { return std::string(rows_name(v)); }
Json write(Elem v) { return std::string(elem_name(v)); }
Json write(Op v) { return std::string(op_name(v)); }
Json write(Role v) { return std::string(role_name(v)); }
Json write(const OpParams& v) { return params_json(v); }
Json write(const std::map<std::string, std::string>& v) {
  Json j = Json::object();
  for (const auto& [key, value] : v) j[key] = value;
  return j;
}
template <class T>
Json write(const std::vector<T>& v) {
  Json j = Json::array();
  for (const T& e : v) j.push_back(write(e));
  return j;
}
struct Writer {
  Json& j;
  template <class T>
  void operator()(const char* key, const T& v) {
    j[key] = write(v);
  }
  template <class T, class D>
  void operator()(const char* key, const T& v, const D& fallback) {
    if (!(v == fallback)) j[key] = write(v);
  }
};
template <class S>
Json write(const S& s) {
  Json j = Json::object();
  fields(s, Writer{j});
  return j;
}

// ---- reading
// ------------------------------------------------------------------------------------------------------------- Each
// read() returns what is wrong, if anything is.
using Problem = std::optional<Error>;

template <class S>
Problem read(const Json& j, const std::string& at, S* s);  // a struct

Error expected(const std::string& at, std::string_view what, const Json& j) {
  return bad_input("{}: expected {}, found {}", at, what, j.type_name());
}

Problem read(const Json& j, const std::string& at, std::string* v) {
  if (!j.is_string()) return expected(at, "a string", j);
  *v = j.get<std::string>();
  return {};
}
Problem read(const Json& j, const std::string& at, bool* v) {
  if (!j.is_boolean()) return expected(at, "true or false", j);
  *v = j.get<bool>();
  return {};
}
Problem read(const Json& j, const std::string& at, int64_t* v) {
  if (!j.is_number_integer()) return expected(at, "an integer", j);
  if (j.is_number_unsigned() && j.get<uint64_t>() > uint64_t(std::numeric_limits<int64_t>::max()))
    return bad_input("{}: {} is too large", at, j.get<uint64_t>());
  *v = j.get<int64_t>();
  return {};
}
Problem read(const Json& j, const std::string& at, int32_t* v) {
  int64_t wide = 0;
  if (auto p = read(j, at, &wide)) return p;
  if (wide < std::numeric_limits<int32_t>::min() || wide > std::numeric_limits<int32_t>::max())
    return bad_input("{}: {} is out of range", at, wide);
  *v = int32_t(wide);
  return {};
}
template <class E, class FromName>
Problem read_enum(const Json& j, const std::string& at, std::string_view kind, FromName&& from_name, E* v) {
  if (!j.is_string()) return expected(at, kind, j);
  const auto found = from_name(j.get<std::string>());
  if (!found) return bad_input("{}: '{}' is not {} that this program knows", at, j.get<std::string>(), kind);
  *v = *found;
  return {};
}
Problem read(const Json& j, const std::string& at, Op* v) { return read_enum(j, at, "an op", op_from_name, v); }
Problem read(const Json& j, const std::string& at, Role* v) {
  return read_enum(j, at, "a weight's role", role_from_name, v);
}
Problem read(const Json& j, const std::string& at, Rows* v) {
  return read_enum(j, at, "a kind of rows", rows_from_name, v);
}
Problem read(const Json& j, const std::string& at, Elem* v) {
  return read_enum(j, at, "a kind of elements", elem_from_name, v);
}
Problem read(const Json& j, const std::string& at, DType* v) { return read_enum(j, at, "a dtype", dtype_from_name, v); }
Problem read(const Json& j, const std::string& at, Packing* v) {
  return read_enum(
      j, at, "a packing",
      [](std::string_view name) -> std::optional<Packing> {
        for (const auto& [packing, n] : kPackings)
          if (n == name) return packing;
        return std::nullopt;
      },
      v);
}
Problem read(const Json& j, const std::string& at, std::map<std::string, std::string>* v) {
  if (!j.is_object()) return expected(at, "an object", j);
  for (const auto& [key, value] : j.items())
    if (auto p = read(value, at + "." + key, &(*v)[key])) return p;
  return {};
}
template <class T>
Problem read(const Json& j, const std::string& at, std::vector<T>* v) {
  if (!j.is_array()) return expected(at, "a list", j);
  v->reserve(j.size());
  for (size_t i = 0; i < j.size(); ++i)
    if (auto p = read(j[i], fmt::format("{}[{}]", at, i), &v->emplace_back())) return p;
  return {};
}
class Reader {
 public:
  Reader(const Json& j, std::string at) : j_(j), at_(std::move(at)) {}
  template <class T>
  void operator()(const char* key, T& v) {
    known_.emplace_back(key);
    if (problem_) return;
    const auto it = j_.find(key);
    if (it == j_.end())
      problem_ = bad_input("{}: '{}' is missing", at_, key);
    else
      problem_ = read(*it, path(key), &v);
  }
  template <class T, class D>
  void operator()(const char* key, T& v, const D& fallback) {
    known_.emplace_back(key);
    if (problem_) return;
    const auto it = j_.find(key);
    if (it == j_.end())
      v = fallback;
    else
      problem_ = read(*it, path(key), &v);
  }
  // Parameters have the form of their op, which stands before them.
  void params(const Op& op, OpParams& v) {
    if (problem_) return;
    const auto it = j_.find("params");
    if (it == j_.end()) {
      problem_ = bad_input("{}: 'params' is missing", at_);
      return;
    }
    auto parsed = params_from_json(op, *it, path("params"));
    if (parsed.ok())
      v = std::move(parsed).value();
    else
      problem_ = parsed.error();
  }
  void operator()(const char* key, OpParams&) { known_.emplace_back(key); }  // see params()
  Problem finish() {
    if (problem_) return problem_;
    if (auto s = refuse_unknown_keys(j_, known_, at_); !s.ok()) return s.error();
    return {};
  }

 private:
  std::string path(const char* key) const { return at_ + "." + key; }
  const Json& j_;
  std::string at_;
  std::vector<std::string> known_;
  Problem problem_;
};

template <class S>
Problem read(const Json& j, const std::string& at, S* s) {
  if (!j.is_object()) return expected(at, "an object", j);
  Reader r(j, at);
  fields(*s, r);
  if constexpr (std::is_same_v<S, Instr>) r.params(s->op, s->params);
  return r.finish();
}

}  // namespace

std::string_view packing_name(Packing p) {
  for (const auto& [packing, name] : kPackings)
    if (packing == p) return name;
  return "?";
}

Json to_json(const Manifest& m) { return write(m); }

std::string manifest_text(const Manifest& m) {
  const Json j = to_json(m);
  std::string out = "{\n";
  size_t left = j.size();
  for (const auto& [key, value] : j.items()) {
    out += dump_json(Json(key)) + ": ";
    const bool rows = value.is_array() && !value.empty() && value[0].is_object();
    if (!rows) {
      out += dump_json(value);
    } else {
      out += "[\n";
      for (size_t i = 0; i < value.size(); ++i)
        out += " " + dump_json(value[i]) + (i + 1 < value.size() ? ",\n" : "\n");
      out += "]";
    }
    out += --left > 0 ? ",\n" : "\n";
  }
  return out + "}\n";
}

Result<Manifest> from_json(const Json& j, const std::string& what) {
  // The version decides whether the rest can be understood at all, so it is looked at first.
  if (!j.is_object()) return expected(what, "an object", j);
  const auto version = j.find("format_version");
  if (version == j.end() || !version->is_number_integer())
    return bad_input("{}: format_version is missing: this is not an engine's manifest", what);
  if (version->is_number_unsigned() ? version->get<uint64_t>() > uint64_t(kFormatVersion)
                                    : version->get<int64_t>() > kFormatVersion)
    return bad_input(
        "{}: the engine has format {}, this program reads up to {}: use a newer metainfer, or build the engine again "
        "with this one",
        what, version->dump(), kFormatVersion);
  Manifest m;
  if (auto p = read(j, what, &m)) return *p;
  return m;
}

Result<Manifest> parse_manifest(std::string_view text, const std::string& what) {
  JsonLimits limits;
  limits.max_bytes = kMaxManifestBytes;
  limits.max_depth = 16;
  MI_TRY(const Json j, parse_json(text, what, limits));
  return from_json(j, what);
}

}  // namespace mi::artifact
