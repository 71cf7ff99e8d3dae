#include "tools/build_config.h"

#include <memory>
#include <optional>

#include "base/json.h"
#include "model/module_pattern.h"
#include "model/yaml.h"

namespace mi::tools {
namespace {

// A mapping under `key` of a mapping; null: absent.
Result<const Json*> mapping(const Json& j, const char* key, const std::string& what, const char* example) {
  const auto it = j.find(key);
  if (it == j.end() || it->is_null()) return static_cast<const Json*>(nullptr);
  if (!it->is_object()) return bad_input("{}: {}: expected a mapping such as {}", what, key, example);
  return &*it;
}

// One entry of fusion.ignore.
struct Name {
  std::string text;
  std::optional<model::ModulePattern> rx;
  bool matches(const std::string& name) const {
    if (rx) return rx->matches(name);
    return name == text || (name.starts_with(text) && name[text.size()] == '.');
  }
};

// Full names of weights and results, as ir::FusionRules::ignores is asked for them.
std::vector<std::string> names_of(const ir::Graph& g) {
  std::vector<std::string> names;
  const auto add = [&](const ir::Block& b, int32_t layer) {
    for (const ir::WeightDecl& d : b.weights) names.push_back(ir::full_name(d.name, layer));
    for (const ir::Value& v : b.values) names.push_back(ir::full_name(v.name, layer));
  };
  add(g.prologue, -1);
  for (const ir::Block& b : g.blocks)
    for (int32_t l : b.layers) add(b, l);
  add(g.epilogue, -1);
  return names;
}

Status fusion(const Json& f, const std::string& what, const ir::Graph& g, compiler::BuildOptions* o) {
  MI_TRY_VOID(refuse_unknown_keys(f, {"ignore", "same_precision_only", "debug_shapes"}, what));
  MI_TRY(o->rules.same_precision_only, json_get_or<bool>(f, "same_precision_only", true, what));
  MI_TRY(o->debug_shapes, json_get_or<bool>(f, "debug_shapes", false, what));
  if (!o->rules.same_precision_only) o->recorded["fusion.same_precision_only"] = "false";
  MI_TRY(const std::vector<std::string> entries, json_get_or<std::vector<std::string>>(f, "ignore", {}, what));
  if (entries.empty()) return {};
  const auto list = std::make_shared<std::vector<Name>>();
  const std::vector<std::string> names = names_of(g);
  for (const std::string& e : entries) {
    Name n{e, {}};
    if (model::ModulePattern::is_one(e)) {
      MI_TRY(n.rx, model::ModulePattern::read(e, what + ": ignore"));
    }
    if (std::none_of(names.begin(), names.end(), [&](const std::string& name) { return n.matches(name); })) {
      const std::string near = nearest_name(e, names);
      return bad_input("{}: ignore: '{}' is no weight or result of this model{}; names look like '{}'", what, e,
                       near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near), names[names.size() / 2]);
    }
    list->push_back(std::move(n));
  }
  o->rules.ignores = [list](const std::string& name) {
    return std::any_of(list->begin(), list->end(), [&](const Name& n) { return n.matches(name); });
  };
  o->recorded["fusion.ignore"] = fmt::format("{}", fmt::join(entries, ", "));
  return {};
}

Status expert_groups(const Json& list, const std::string& what, compiler::BuildOptions* o) {
  if (!list.is_array()) return bad_input("{}: expected a list such as [{{layers: [1, 2], size: 8}}]", what);
  for (const Json& entry : list) {
    if (!entry.is_object()) return bad_input("{}: every entry is a mapping such as {{layers: [1, 2], size: 8}}", what);
    MI_TRY_VOID(refuse_unknown_keys(entry, {"layers", "size", "members"}, what));
    compiler::ExpertGroups g;
    MI_TRY(const std::vector<int64_t> layers, json_get_or<std::vector<int64_t>>(entry, "layers", {}, what));
    for (int64_t l : layers) {
      if (l < 0 || l > 100'000) return bad_input("{}: layers: {} is no layer", what, l);
      g.layers.push_back(int32_t(l));
    }
    MI_TRY(g.size, json_get_or<int64_t>(entry, "size", 0, what));
    const auto members = entry.find("members");
    if ((members != entry.end()) == (entry.find("size") != entry.end()))
      return bad_input("{}: an entry has either a size or its members", what);
    if (members == entry.end()) {
      if (g.size < 1) return bad_input("{}: size: {} is no number of experts", what, g.size);
    } else {
      const std::string at = what + ": members: expected lists of experts such as [[0, 2], [1, 3]]";
      if (!members->is_array()) return bad_input("{}", at);
      for (const Json& group : *members) {
        if (!group.is_array() || group.empty()) return bad_input("{}", at);
        g.members.emplace_back();
        for (const Json& e : group) {
          if (!e.is_number_integer() || e.get<int64_t>() < 0 || e.get<int64_t>() > 1'000'000) return bad_input("{}", at);
          g.members.back().push_back(int32_t(e.get<int64_t>()));
        }
      }
    }
    o->expert_groups.push_back(std::move(g));
  }
  o->recorded["expert_groups"] = dump_json(list);
  return {};
}

Status build_options(const Json& b, const std::string& what, const ir::Graph& g, compiler::BuildOptions* o) {
  MI_TRY_VOID(refuse_unknown_keys(
      b, {"opt_level", "precision", "disable_passes", "strict", "allow_fallback", "fusion", "expert_groups"}, what));
  MI_TRY(const std::string level, json_get_or<std::string>(b, "opt_level", fmt::format("O{}", o->opt_level), what));
  if (level != "O0" && level != "O1" && level != "O2") return bad_input("{}: opt_level: expected O0, O1 or O2, not '{}'", what, level);
  o->opt_level = level[1] - '0';
  MI_TRY(o->precision, json_get_or<std::string>(b, "precision", o->precision, what));
  if (!o->precision.empty() && o->precision != "fp32" && o->precision != "bf16")
    return bad_input("{}: precision: expected fp32 or bf16, not '{}'", what, o->precision);
  MI_TRY(o->disabled_passes, json_get_or<std::vector<std::string>>(b, "disable_passes", o->disabled_passes, what));
  MI_TRY(o->strict, json_get_or<bool>(b, "strict", o->strict, what));
  MI_TRY(o->allowed_fallbacks, json_get_or<std::vector<std::string>>(b, "allow_fallback", o->allowed_fallbacks, what));
  MI_TRY(const Json* f, mapping(b, "fusion", what, "{ignore: [\"re:layers\\\\.0\\\\.\"]}"));
  if (f) MI_TRY_VOID(fusion(*f, what + ": fusion", g, o));
  if (const auto it = b.find("expert_groups"); it != b.end() && !it->is_null())
    MI_TRY_VOID(expert_groups(*it, what + ": expert_groups", o));
  return {};
}

}  // namespace

Status apply_build_config(std::string_view yaml, const std::string& what, const ir::Graph& g, compiler::BuildOptions* o) {
  MI_TRY(const Json root, model::parse_yaml(yaml, what));
  if (!root.is_object()) return bad_input("{}: expected a mapping with the key 'build'", what);
  MI_TRY_VOID(refuse_unknown_keys(root, {"build"}, what));
  MI_TRY(const Json* b, mapping(root, "build", what, "{opt_level: O2}"));
  if (!b) return bad_input("{}: 'build:' with its options is missing", what);
  return build_options(*b, what, g, o);
}

Status load_build_config(const Path& file, const ir::Graph& g, compiler::BuildOptions* o) {
  MI_TRY(const std::string text, read_file(file, size_t(1) << 20));
  return apply_build_config(text, file.filename().string(), g, o);
}

}  // namespace mi::tools
