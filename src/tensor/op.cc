#include "tensor/op.h"

#include <bit>
#include <charconv>
#include <cmath>

#include "tensor/op_fields.h"

namespace mi {
namespace {

template <typename T>
struct Named { T value; std::string_view name; };

constexpr Named<Op> kOps[] = {
    {Op::kEmbed, "embed"}, {Op::kRmsNorm, "rms_norm"}, {Op::kQuantize, "quantize"}, {Op::kLinear, "linear"}, {Op::kClamp, "clamp"},
    {Op::kRope, "rope"}, {Op::kKvAppend, "kv_append"}, {Op::kAttention, "attention"}, {Op::kIndexAppend, "index_append"},
    {Op::kIndexSelect, "index_select"}, {Op::kAdd, "add"}, {Op::kScale, "scale"}, {Op::kActivation, "activation"}, {Op::kRoute, "route"},
    {Op::kExpertLinear, "expert_linear"}, {Op::kExpertCombine, "expert_combine"}, {Op::kGroupedExperts, "grouped_experts"},
    {Op::kSigmoidMul, "sigmoid_mul"}, {Op::kSlice, "slice"}, {Op::kSelectRows, "select_rows"},
};
constexpr Named<Role> kRoles[] = {
    {Role::kWeight, "weight"}, {Role::kBias, "bias"}, {Role::kGate, "gate"}, {Role::kGateBias, "gate_bias"}, {Role::kUp, "up"},
    {Role::kUpBias, "up_bias"}, {Role::kDown, "down"}, {Role::kDownBias, "down_bias"}, {Role::kInvFreq, "inv_freq"}, {Role::kSinks, "sinks"},
    {Role::kSelectBias, "select_bias"}, {Role::kInScale, "in_scale"},
};
constexpr Named<Elem> kElems[] = {
    {Elem::kF32, "f32"}, {Elem::kQ8, "q8"}, {Elem::kI32, "i32"}, {Elem::kRoute, "route"}, {Elem::kState, "state"}};
constexpr Named<Rows> kRows[] = {{Rows::kToken, "token"}, {Rows::kPair, "pair"}, {Rows::kLogit, "logit"}};
constexpr Named<ActKind> kActs[] = {{ActKind::kSilu, "silu"}, {ActKind::kGelu, "gelu"}, {ActKind::kGeluTanh, "gelu_tanh"}, {ActKind::kRelu, "relu"},
                                    {ActKind::kSwigluOai, "swiglu_oai"}};
constexpr Named<RouteScore> kScores[] = {{RouteScore::kSoftmax, "softmax"}, {RouteScore::kSigmoid, "sigmoid"}, {RouteScore::kNone, "none"}};
constexpr Named<GroupBy> kGroupBys[] = {{GroupBy::kMax, "max"}, {GroupBy::kTop2, "top2"}};

template <typename T, size_t N>
std::string_view name_in(const Named<T> (&table)[N], T value) {
  for (const Named<T>& n : table)
    if (n.value == value) return n.name;
  return "?";
}
template <typename T, size_t N>
std::optional<T> value_in(const Named<T> (&table)[N], std::string_view name) {
  for (const Named<T>& n : table)
    if (n.name == name) return n.value;
  return std::nullopt;
}
template <typename T, size_t N>
std::vector<std::string> names_in(const Named<T> (&table)[N]) {
  std::vector<std::string> names;
  for (const Named<T>& n : table) names.emplace_back(n.name);
  return names;
}

// ---- one field as text -----------------------------------------------------------------------------------------------
std::string text_of(float f) { return float_text(f); }
std::string text_of(int64_t i) { return std::to_string(i); }
std::string text_of(bool b) { return b ? "true" : "false"; }
std::string text_of(ActKind k) { return std::string(name_in(kActs, k)); }
std::string text_of(RouteScore k) { return std::string(name_in(kScores, k)); }
std::string text_of(GroupBy k) { return std::string(name_in(kGroupBys, k)); }

bool parse(std::string_view t, float* out) {
  if (t == "inf" || t == "-inf" || t == "nan") return false;
  const auto r = std::from_chars(t.data(), t.data() + t.size(), *out);
  return r.ec == std::errc() && r.ptr == t.data() + t.size() && std::isfinite(*out);
}
bool parse(std::string_view t, int64_t* out) {
  const auto r = std::from_chars(t.data(), t.data() + t.size(), *out);
  return r.ec == std::errc() && r.ptr == t.data() + t.size();
}
bool parse(std::string_view t, bool* out) {
  *out = t == "true";
  return t == "true" || t == "false";
}
template <typename T, size_t N>
bool parse_name(const Named<T> (&table)[N], std::string_view t, T* out) {
  const auto v = value_in(table, t);
  if (v) *out = *v;
  return v.has_value();
}
bool parse(std::string_view t, ActKind* out) { return parse_name(kActs, t, out); }
bool parse(std::string_view t, RouteScore* out) { return parse_name(kScores, t, out); }
bool parse(std::string_view t, GroupBy* out) { return parse_name(kGroupBys, t, out); }

std::string expected(float) { return "a finite number"; }
std::string expected(int64_t) { return "an integer"; }
std::string expected(bool) { return "true or false"; }
template <typename T>
std::string expected(T) {
  std::vector<std::string> names;
  if constexpr (std::is_same_v<T, ActKind>) names = names_in(kActs);
  if constexpr (std::is_same_v<T, RouteScore>) names = names_in(kScores);
  if constexpr (std::is_same_v<T, GroupBy>) names = names_in(kGroupBys);
  return fmt::format("one of {}", fmt::join(names, ", "));
}

// ---- one field as JSON -------------------------------------------------------------------------------------------------
// The double that prints as short as the float does (1e-06, not 9.999999974752427e-07), as long as it reads back to it.
Json json_of(float f) {
  const std::string t = float_text(f);
  double d = 0;
  std::from_chars(t.data(), t.data() + t.size(), d);
  return std::bit_cast<uint32_t>(float(d)) == std::bit_cast<uint32_t>(f) ? d : double(f);
}
Json json_of(int64_t i) { return i; }
Json json_of(bool b) { return b; }
template <typename T>
Json json_of(T v) { return text_of(v); }

bool from_json(const Json& j, float* out) {
  if (!j.is_number()) return false;
  *out = float(j.get<double>());
  return std::isfinite(*out);
}
bool from_json(const Json& j, int64_t* out) {
  if (!j.is_number_integer() || (j.is_number_unsigned() && j.get<uint64_t>() > uint64_t(INT64_MAX))) return false;
  *out = j.get<int64_t>();
  return true;
}
bool from_json(const Json& j, bool* out) {
  if (!j.is_boolean()) return false;
  *out = j.get<bool>();
  return true;
}
template <typename T>
bool from_json(const Json& j, T* out) { return j.is_string() && parse(j.get<std::string>(), out); }

template <typename F>
void visit_params(OpParams& p, F&& f) {
  std::visit([&](auto& s) { std::decay_t<decltype(s)>::visit(s, f); }, p);
}

template <size_t... I>
OpParams default_of(size_t index, std::index_sequence<I...>) {
  OpParams p;
  ((index == I ? void(p.emplace<I>()) : void()), ...);
  return p;
}

// Reads the given fields; get(key, field*) -> 0 absent, 1 read, -1 wrong type.
template <typename Get>
Result<OpParams> read_params(Op op, const std::vector<std::string>& given, const std::string& what, Get&& get) {
  OpParams p = default_params(op);
  std::vector<std::string> known;
  std::optional<Error> error;
  visit_params(p, [&](const char* key, auto& field) {
    known.emplace_back(key);
    if (!error && get(key, &field) < 0) error = bad_input("{}: {}: {} must be {}", what, op_name(op), key, expected(field));
  });
  if (error) return *error;
  for (const std::string& g : given) {
    bool found = false;
    for (const std::string& k : known) found = found || k == g;
    if (found) continue;
    const std::string near = nearest_name(g, known);
    return bad_input("{}: {} has no field '{}'{}", what, op_name(op), g, near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near));
  }
  return p;
}

}  // namespace

std::string_view op_name(Op op) { return name_in(kOps, op); }
std::string_view role_name(Role role) { return name_in(kRoles, role); }
std::optional<Op> op_from_name(std::string_view n) { return value_in(kOps, n); }
std::optional<Role> role_from_name(std::string_view n) { return value_in(kRoles, n); }
std::string_view elem_name(Elem e) { return name_in(kElems, e); }
std::optional<Elem> elem_from_name(std::string_view n) { return value_in(kElems, n); }
std::string_view rows_name(Rows r) { return name_in(kRows, r); }
std::optional<Rows> rows_from_name(std::string_view n) { return value_in(kRows, n); }

OpParams default_params(Op op) { return default_of(size_t(op), std::make_index_sequence<std::variant_size_v<OpParams>>()); }

std::string float_text(float f) {
  char buffer[32];
  const auto r = std::to_chars(buffer, buffer + sizeof buffer, f);
  return std::string(buffer, r.ptr);
}

std::string params_text(const OpParams& p) {
  OpParams copy = p, fallback = default_params(Op(p.index()));
  std::vector<std::string> defaults, out;
  visit_params(fallback, [&](const char*, auto& field) { defaults.push_back(text_of(field)); });
  size_t i = 0;
  visit_params(copy, [&](const char* key, auto& field) {
    const std::string t = text_of(field);
    if (t != defaults[i++]) out.push_back(std::string(key) + "=" + t);
  });
  return fmt::format("{}", fmt::join(out, " "));
}

Result<OpParams> params_from_text(Op op, const std::vector<std::pair<std::string, std::string>>& fields, const std::string& what) {
  std::vector<std::string> given;
  for (const auto& [key, value] : fields) {
    for (const std::string& g : given)
      if (g == key) return bad_input("{}: {}: the field '{}' is given twice", what, op_name(op), key);
    given.push_back(key);
  }
  return read_params(op, given, what, [&](const char* key, auto* field) {
    for (const auto& [k, value] : fields)
      if (k == key) return parse(value, field) ? 1 : -1;
    return 0;
  });
}

Json params_json(const OpParams& p) {
  OpParams copy = p, fallback = default_params(Op(p.index()));
  std::vector<Json> defaults;
  visit_params(fallback, [&](const char*, auto& field) { defaults.push_back(json_of(field)); });
  Json j = Json::object();
  size_t i = 0;
  visit_params(copy, [&](const char* key, auto& field) {
    const Json v = json_of(field);
    if (v.dump() != defaults[i++].dump()) j[key] = v;     // as text: -0 is not 0
  });
  return j;
}

Result<OpParams> params_from_json(Op op, const Json& j, const std::string& what) {
  if (!j.is_object()) return bad_input("{}: {}: the parameters must be an object", what, op_name(op));
  std::vector<std::string> given;
  for (const auto& [key, value] : j.items()) given.push_back(key);
  return read_params(op, given, what, [&](const char* key, auto* field) {
    if (!j.contains(key)) return 0;
    return from_json(j[key], field) ? 1 : -1;
  });
}

}  // namespace mi
