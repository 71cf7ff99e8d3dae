#include "artifact/expert_profile.h"

#include <map>

#include "base/json.h"

namespace mi::artifact {
namespace {

constexpr const char* kFormat = "metainfer expert profile 1";

}  // namespace

std::vector<int64_t> ExpertProfile::Layer::counts(int64_t begin, int64_t end) const {
  std::vector<int64_t> n(static_cast<size_t>(experts));
  for (int64_t i = begin * k; i < end * k; ++i) ++n[size_t(ids[size_t(i)])];
  return n;
}

Status write_expert_profile(const ExpertProfile& p, const Path& file, bool force) {
  Json j{{"format", kFormat}, {"model", p.model}, {"source", p.source}, {"tokens", p.tokens}, {"layers", Json::array()}};
  for (const ExpertProfile::Layer& l : p.layers) j["layers"].push_back({{"layer", l.layer}, {"experts", l.experts}, {"k", l.k}, {"ids", l.ids}});
  MI_TRY(OutputFile out, OutputFile::create(file, force));
  MI_TRY_VOID(out.writer().write(dump_json(j) + "\n"));
  return out.commit();
}

Result<ExpertProfile> read_expert_profile(const Path& file, const Manifest& m) {
  const std::string what = file.string();
  MI_TRY(const Json j, read_json(file));
  if (!j.is_object() || !j.contains("format") || j["format"] != kFormat)
    return bad_input("{}: no expert profile; 'metainfer profile --experts FILE' writes one", what);
  MI_TRY_VOID(refuse_unknown_keys(j, {"format", "model", "source", "tokens", "layers"}, what));
  ExpertProfile p;
  MI_TRY(p.model, json_get<std::string>(j, "model", what));
  MI_TRY(p.source, json_get<std::string>(j, "source", what));
  MI_TRY(p.tokens, json_get<int64_t>(j, "tokens", what));
  if (!j.contains("layers") || !j["layers"].is_array()) return bad_input("{}: layers: expected an array", what);
  std::map<int64_t, const Instr*> routes;
  for (const Instr& i : m.program)
    if (i.op == Op::kRoute) routes[i.layer] = &i;
  for (const Json& x : j["layers"]) {
    const std::string where = fmt::format("{}: layers[{}]", what, p.layers.size());
    if (!x.is_object()) return bad_input("{}: expected an object", where);
    MI_TRY_VOID(refuse_unknown_keys(x, {"layer", "experts", "k", "ids"}, where));
    ExpertProfile::Layer l;
    MI_TRY(const int64_t layer, json_get<int64_t>(x, "layer", where));
    MI_TRY(l.experts, json_get<int64_t>(x, "experts", where));
    MI_TRY(l.k, json_get<int64_t>(x, "k", where));
    MI_TRY(const std::vector<int64_t> ids, json_get<std::vector<int64_t>>(x, "ids", where));
    const auto route = routes.find(layer);
    if (route == routes.end() || std::get<RouteParams>(route->second->params).experts != l.experts || route->second->out[0].type.cols != l.k)
      return bad_input("{}: layer {} with {} of {} experts is none of this engine's: the profile belongs to another model ({})", where, layer, l.k, l.experts, p.model);
    if (!p.layers.empty() && p.layers.back().layer >= layer) return bad_input("{}: layer {} does not follow layer {}", where, layer, p.layers.back().layer);
    if (p.tokens < 0 || p.tokens > int64_t(1) << 40 || int64_t(ids.size()) != p.tokens * l.k) return bad_input("{}: {} ids, expected {} for {} tokens", where, ids.size(), p.tokens * l.k, p.tokens);
    for (const int64_t id : ids) {
      if (id < 0 || id >= l.experts) return bad_input("{}: expert {} of {}", where, id, l.experts);
      if (int64_t(l.ids.size()) % l.k != 0 && l.ids.back() >= id) return bad_input("{}: expert {} follows {}: a token's experts ascend", where, id, l.ids.back());
      l.ids.push_back(int32_t(id));
    }
    l.layer = int32_t(layer);
    p.layers.push_back(std::move(l));
  }
  if (p.layers.empty() || p.tokens < 2) return bad_input("{}: {} tokens of {} layers with experts: nothing to learn from", what, p.tokens, p.layers.size());
  return p;
}

}  // namespace mi::artifact
