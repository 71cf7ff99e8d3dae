#include "model/recipe.h"

#include <algorithm>

#include "model/export.h"
#include "model/yaml.h"

namespace mi::model {
namespace {

constexpr const char* kCommon = "common";
const std::vector<std::string> kSections = {"norm",       "attention", "rope", "window", "index",
                                            "activation", "mlp",       "moe",  "scalars"};
const std::vector<std::string> kRecipeKeys = {"family",  "model_types", "misspelled",   "text_config", "config",
                                        "require", "norm",        "attention",    "rope",        "window",
                                        "index",   "activation",  "mlp",          "moe",         "scalars",
                                        "tensors", "skip",        "extra_layers", "ignored_keys"};

std::string plain_type(std::string s) {
  for (char& c : s) c = c == '-' ? '_' : char(std::tolower(static_cast<unsigned char>(c)));
  return s;
}

Result<KeyType> key_type(const std::string& name, const std::string& what) {
  static const std::map<std::string, KeyType> kTypes = {
      {"int", KeyType::kInt},   {"float", KeyType::kFloat},     {"bool", KeyType::kBool}, {"string", KeyType::kString},
      {"ints", KeyType::kInts}, {"strings", KeyType::kStrings}, {"any", KeyType::kAny}};
  const auto it = kTypes.find(name);
  if (it == kTypes.end())
    return bad_input("{}: type '{}' is none of int, float, bool, string, ints, strings, any", what, name);
  return it->second;
}

// Fields that are there replace those of *spec.
Status merge_key(const Json& j, KeySpec* spec, const std::string& what) {
  MI_TRY_VOID(refuse_unknown_keys(j, {"keys", "type", "default", "min", "nested_wins"}, what));
  if (j.contains("keys")) {
    MI_TRY(spec->keys, json_get<std::vector<std::string>>(j, "keys", what));
    if (spec->keys.empty()) return bad_input("{}: keys is empty", what);
  }
  if (j.contains("type")) {
    MI_TRY(const std::string t, json_get<std::string>(j, "type", what));
    MI_TRY(spec->type, key_type(t, what));
  }
  if (j.contains("default")) {
    spec->has_default = true;
    spec->fallback = j["default"];
  }
  MI_TRY(spec->min, json_get_or<int64_t>(j, "min", spec->min, what));
  MI_TRY(spec->nested_wins, json_get_or<bool>(j, "nested_wins", spec->nested_wins, what));
  return {};
}

Status merge_keys(const Json& j, KeySpecs* specs, const std::string& what) {
  if (j.is_null()) return {};
  if (!j.is_object()) return bad_input("{}: config: expected a mapping", what);
  for (const auto& [name, key] : j.items())
    MI_TRY_VOID(merge_key(key, &(*specs)[name], fmt::format("{}: config: {}", what, name)));
  return {};
}

Result<Alternative> parse_alternative(const Json& j, const std::string& prefix, const std::string& what) {
  Alternative a;
  if (j.is_string()) {
    a.from = {prefix + j.get<std::string>()};
    return a;
  }
  MI_TRY_VOID(refuse_unknown_keys(j, {"from", "ops", "quantized"}, what));
  if (!j.contains("from")) return bad_input("{}: from is missing", what);
  if (j["from"].is_string()) {
    a.from = {j["from"].get<std::string>()};
  } else {
    MI_TRY(a.from, json_get<std::vector<std::string>>(j, "from", what));
  }
  if (a.from.empty()) return bad_input("{}: from is empty", what);
  for (std::string& f : a.from) f = prefix + f;
  if (j.contains("quantized")) {
    MI_TRY(a.quantized, json_get<bool>(j, "quantized", what));
  }
  if (j.contains("ops")) {
    if (!j["ops"].is_array()) return bad_input("{}: ops: expected a list", what);
    a.ops = j["ops"];
  }
  return a;
}

// A later binding of the same name replaces an earlier one.
Status merge_bindings(const Json& j, const std::string& prefix, Bindings* b, const std::string& what) {
  if (j.is_null()) return {};
  if (!j.is_object()) return bad_input("{}: expected a mapping", what);
  for (const auto& [name, source] : j.items()) {
    std::vector<Alternative> list;
    const std::string at = fmt::format("{}: {}", what, name);
    if (source.is_array()) {
      for (const Json& alternative : source) {
        MI_TRY(Alternative a, parse_alternative(alternative, prefix, at));
        list.push_back(std::move(a));
      }
    } else {
      MI_TRY(Alternative a, parse_alternative(source, prefix, at));
      list.push_back(std::move(a));
    }
    if (list.empty()) return bad_input("{}: no source", at);
    (*b)[name] = std::move(list);
  }
  return {};
}

Status parse_tensors(const Json& common, const Json& own, Recipe* r, const std::string& what) {
  const Json tensors = own.contains("tensors") ? own["tensors"] : Json::object();
  MI_TRY_VOID(refuse_unknown_keys(tensors, {"include", "layer_prefix", "top", "layer"}, what + ": tensors"));
  MI_TRY(r->layer_prefix, json_get_or<std::string>(tensors, "layer_prefix", common["layer_prefix"].get<std::string>(),
                                                   what + ": tensors"));
  if (r->layer_prefix.find("{layer}") == r->layer_prefix.npos)
    return bad_input("{}: tensors: layer_prefix has to hold {{layer}}", what);
  MI_TRY(const auto include, json_get_or<std::vector<std::string>>(tensors, "include", {}, what + ": tensors"));
  MI_TRY_VOID(merge_bindings(common["top"], "", &r->top, what));
  for (const std::string& g : include) {
    if (!common["tensor_groups"].contains(g)) {
      std::vector<std::string> known;
      for (const auto& [k, v] : common["tensor_groups"].items()) known.push_back(k);
      return bad_input("{}: tensors: include: '{}' is no group of common.yaml ({})", what, g, fmt::join(known, ", "));
    }
    MI_TRY_VOID(merge_bindings(common["tensor_groups"][g], r->layer_prefix, &r->layer, what));
  }
  MI_TRY_VOID(merge_bindings(tensors.contains("top") ? tensors["top"] : Json(), "", &r->top, what + ": tensors: top"));
  return merge_bindings(tensors.contains("layer") ? tensors["layer"] : Json(), r->layer_prefix, &r->layer,
                        what + ": tensors: layer");
}

Status parse_skips(const Json& list, Recipe* r, const std::string& what) {
  if (list.is_null()) return {};
  if (!list.is_array()) return bad_input("{}: skip: expected a list", what);
  for (const Json& s : list) {
    MI_TRY_VOID(refuse_unknown_keys(s, {"names", "why"}, what + ": skip"));
    MI_TRY(std::string names, json_get<std::string>(s, "names", what + ": skip"));
    MI_TRY(std::string why, json_get<std::string>(s, "why", what + ": skip"));
    r->skip.push_back({std::move(names), std::move(why)});
  }
  return {};
}

const Json& common_json() {
  static const Json j = [] {
    for (const EmbeddedFamily& f : embedded_families())
      if (f.name == kCommon) {
        auto parsed = parse_yaml(f.text, "common.yaml");
        MI_CHECK(parsed.ok(), "{}", parsed.error().message());
        return std::move(parsed).value();
      }
    MI_CHECK(false, "common.yaml is not embedded");
    std::abort();
  }();
  return j;
}

Json get_or_null(const Json& j, const char* key) { return j.contains(key) ? j[key] : Json(); }

// Every built-in recipe, parsed once; a built-in one that does not parse is a bug.
const std::vector<Recipe>& built_in() {
  static const std::vector<Recipe> recipes = [] {
    std::vector<Recipe> list;
    for (const EmbeddedFamily& f : embedded_families()) {
      if (f.name == kCommon) continue;
      auto r = parse_recipe(f.text, std::string(f.name) + ".yaml");
      MI_CHECK(r.ok(), "{}", r.error().message());
      list.push_back(std::move(r).value());
    }
    return list;
  }();
  return recipes;
}

}  // namespace

const Json& Recipe::section(const std::string& name) const {
  static const Json kEmpty = Json::object();
  const auto it = sections.find(name);
  return it == sections.end() ? kEmpty : it->second;
}

Result<Recipe> parse_recipe(std::string_view yaml, const std::string& what) {
  MI_TRY(const Json own, parse_yaml(yaml, what));
  MI_TRY_VOID(refuse_unknown_keys(own, kRecipeKeys, what));
  const Json& common = common_json();
  Recipe r;
  r.file = what;
  MI_TRY(r.family, json_get<std::string>(own, "family", what));
  MI_TRY(r.model_types, json_get<std::vector<std::string>>(own, "model_types", what));
  MI_TRY(r.misspelled, json_get_or<std::vector<std::string>>(own, "misspelled", {}, what));
  MI_TRY(r.text_config, json_get_or<std::vector<std::string>>(own, "text_config", {}, what));
  MI_TRY(r.ignored_keys, json_get_or<std::vector<std::string>>(common, "ignored_keys", {}, what));
  MI_TRY(const auto ignored, json_get_or<std::vector<std::string>>(own, "ignored_keys", {}, what));
  r.ignored_keys.insert(r.ignored_keys.end(), ignored.begin(), ignored.end());
  MI_TRY_VOID(merge_keys(common["config"], &r.keys, "common.yaml"));
  MI_TRY_VOID(merge_keys(get_or_null(own, "config"), &r.keys, what));
  for (const auto& [name, spec] : r.keys)
    if (spec.keys.empty()) return bad_input("{}: config: {}: keys is missing", what, name);
  if (own.contains("require")) {
    if (!own["require"].is_object()) return bad_input("{}: require: expected a mapping", what);
    for (const auto& [key, values] : own["require"].items()) {
      if (!values.is_array()) return bad_input("{}: require: {}: expected a list of values", what, key);
      r.require.push_back({key, values});
    }
  }
  for (const std::string& s : kSections)
    if (own.contains(s)) {
      if (!own[s].is_object()) return bad_input("{}: {}: expected a mapping", what, s);
      r.sections[s] = own[s];
    }
  MI_TRY_VOID(parse_tensors(common, own, &r, what));
  for (const auto& [from, to] : common["rename"].items()) r.rename.push_back({from, to.get<std::string>()});
  MI_TRY_VOID(parse_skips(common["skip"], &r, "common.yaml"));
  MI_TRY_VOID(parse_skips(get_or_null(own, "skip"), &r, what));
  r.extra_layers = get_or_null(own, "extra_layers");
  return r;
}

bool same_model_type(std::string a, std::string b) { return plain_type(std::move(a)) == plain_type(std::move(b)); }

bool accepts(const Recipe& r, const std::string& type) {
  const auto fits = [&](const std::string& t) { return same_model_type(t, type); };
  return std::any_of(r.model_types.begin(), r.model_types.end(), fits) ||
         std::any_of(r.misspelled.begin(), r.misspelled.end(), fits);
}

const std::pair<std::string, std::string>* wrapper_of(const Recipe& r, std::string_view name) {
  const auto it = std::find_if(r.rename.begin(), r.rename.end(), [&](const auto& p) { return name.starts_with(p.first); });
  return it == r.rename.end() ? nullptr : &*it;
}

Result<Recipe> find_recipe(const std::string& type, const std::string& path) {
  for (const Recipe& r : built_in()) {
    if (!accepts(r, type)) continue;
    Recipe copy = r;
    for (const std::string& m : r.misspelled)
      if (same_model_type(m, type))
        copy.notes.push_back(fmt::format("model type '{}' is taken for '{}'", type, r.family));
    return copy;
  }
  const std::vector<std::string> known = known_model_types();
  const std::string near = nearest_name(plain_type(type), known);
  return bad_input(
      "{}: model_type '{}' is not known{}; known are {}. A recipe for another model that is built of known blocks can "
      "be given with --family-file",
      path, type, near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near), fmt::join(known, ", "));
}

std::vector<std::string> known_families() {
  std::vector<std::string> names;
  for (const Recipe& r : built_in()) names.push_back(r.family);
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> known_model_types() {
  std::vector<std::string> names;
  for (const Recipe& r : built_in()) names.insert(names.end(), r.model_types.begin(), r.model_types.end());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace mi::model
