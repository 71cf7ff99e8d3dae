#include "model/origin.h"

#include <charconv>
#include <optional>

namespace mi::model {
namespace {

constexpr std::string_view kExpert = "{expert}";

// 12 for "a.12.b" and the template "a.{expert}.b"; -1 for a template without {expert} that equals the name; else nothing.
std::optional<int64_t> match(std::string_view pattern, std::string_view name) {
  const size_t at = pattern.find(kExpert);
  if (at == pattern.npos) return pattern == name ? std::optional<int64_t>(-1) : std::nullopt;
  const std::string_view head = pattern.substr(0, at), tail = pattern.substr(at + kExpert.size());
  if (name.size() <= head.size() + tail.size() || !name.starts_with(head) || !name.ends_with(tail)) return std::nullopt;
  const std::string_view number = name.substr(head.size(), name.size() - head.size() - tail.size());
  int64_t n = -1;
  const auto r = std::from_chars(number.data(), number.data() + number.size(), n);
  if (r.ec != std::errc() || r.ptr != number.data() + number.size() || n < 0) return std::nullopt;
  return n;
}

Result<Origin> parse_origin(const Json& j, const std::string& what) {
  Origin o;
  MI_TRY(o.from, json_get<std::vector<std::string>>(j, "from", what));
  MI_TRY(o.rows, json_get_or<std::vector<int64_t>>(j, "rows", {}, what));
  if (j.contains("ops")) { MI_TRY(o.ops, parse_view_ops(j["ops"], nullptr, what)); }
  MI_TRY(o.shape, json_get_or<std::vector<int64_t>>(j, "shape", {}, what));
  if (o.from.empty() || (o.from.size() > 1 || !o.rows.empty() ? o.rows.size() != o.from.size() : false))
    return bad_input("{}: expected one number in rows for each name in from", what);
  return o;
}

}  // namespace

Json origins_json(const Origins& origins) {
  Json out = Json::object();
  for (const auto& [tensor, o] : origins) {
    Json j{{"from", o.from}};
    if (!o.rows.empty()) j["rows"] = o.rows;
    if (!o.ops.empty()) j["ops"] = ops_json(o.ops);
    if (!o.shape.empty()) j["shape"] = o.shape;
    out[tensor] = std::move(j);
  }
  return out;
}

Result<Origins> read_origins(const Json& provenance, const std::string& what) {
  if (!provenance.is_object() || !provenance.contains("tensors"))
    return bad_input("{}: does not say which tensors of the checkpoint the weights are; export the checkpoint again", what);
  const Json& tensors = provenance["tensors"];
  if (!tensors.is_object()) return bad_input("{}: tensors: expected an object", what);
  Origins out;
  for (const auto& [name, j] : tensors.items()) {
    MI_TRY(out[name], parse_origin(j, what + ": tensors." + name));
  }
  return out;
}

std::vector<OriginPart> parts_from(const Origins& origins, std::string_view name) {
  std::vector<OriginPart> out;
  for (const auto& [tensor, o] : origins) {
    int64_t row = 0;
    for (size_t i = 0; i < o.from.size(); ++i) {
      if (const auto expert = match(o.from[i], name)) out.push_back({tensor, *expert, row, &o});
      if (!o.rows.empty()) row += o.rows[i];
    }
  }
  return out;
}

}  // namespace mi::model
