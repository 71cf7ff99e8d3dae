#include "tools/hf/config.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/check.h"
#include "model/config.h"

namespace mi::tools::hf {
namespace {

constexpr size_t kMostPattern = 900;  // characters, so that readers with limits (ours has 1000) take it

std::string replace_all(std::string s, std::string_view what, const std::string& with) {
  for (size_t at = s.find(what); at != s.npos; at = s.find(what, at + with.size())) s.replace(at, what.size(), with);
  return s;
}

Json scheme(ir::WeightFormat format, int64_t group) {
  const bool int8 = format == ir::WeightFormat::kW8A8;
  Json weights = {{"num_bits", int8 ? 8 : 4},
                  {"type", "int"},
                  {"symmetric", true},
                  {"strategy", int8 ? "channel" : "group"},
                  {"group_size", int8 ? Json() : Json(group)},
                  {"block_structure", nullptr},
                  {"dynamic", false},
                  {"actorder", nullptr},
                  {"observer", "minmax"},
                  {"observer_kwargs", Json::object()}};
  Json inputs;
  if (int8) {
    inputs = weights;
    inputs["strategy"] = "token";
    inputs["dynamic"] = true;
    inputs["observer"] = nullptr;
  }
  return {{"weights", std::move(weights)}, {"input_activations", std::move(inputs)}, {"output_activations", nullptr}};
}
const char* format_name(ir::WeightFormat f) {
  return f == ir::WeightFormat::kW8A8 ? "int-quantized" : "pack-quantized";
}

// Modules of one name but for layer and expert, in some layers (empty: in all that have it), as "re:" patterns.
void add_patterns(const std::string& family, const std::vector<int32_t>& layers, Json* out) {
  const std::string rx = "re:^" + replace_all(replace_all(family, ".", "\\."), "{expert}", "\\d+") + "$";
  if (layers.empty() || family.find("{layer}") == family.npos) {
    out->push_back(replace_all(rx, "{layer}", "\\d+"));
    return;
  }
  std::string list;
  const auto flush = [&] {
    if (!list.empty()) out->push_back(replace_all(rx, "{layer}", "(?:" + list + ")"));
    list.clear();
  };
  for (int32_t l : layers) {
    if (rx.size() + list.size() + 16 > kMostPattern) flush();
    list += (list.empty() ? "" : "|") + std::to_string(l);
  }
  flush();
}

}  // namespace

Json quantization_config(const std::vector<Module>& modules, const std::vector<std::string>& skipped) {
  using Key = std::pair<ir::WeightFormat, int64_t>;
  Json ignore = Json::array();
  std::map<Key, std::map<std::string, std::set<int32_t>>> groups;
  std::map<std::string, std::set<Key>> forms;  // of a family of modules
  std::set<const char*> formats;
  for (const Module& m : modules) {
    const Key key{m.format, m.group};
    if (m.format == ir::WeightFormat::kFloat) {
      ignore.push_back(m.name);
      continue;
    }
    groups[key][m.family].insert(m.layer);
    forms[m.family].insert(key);
    formats.insert(format_name(m.format));
  }
  for (const std::string& s : skipped) ignore.push_back(s);
  MI_CHECK(!groups.empty(), "no quantized module");
  Json config_groups = Json::object();
  for (const auto& [key, families] : groups) {
    Json targets = Json::array();
    if (groups.size() == 1) {
      targets.push_back("Linear");
    } else {
      for (const auto& [family, layers] : families)
        add_patterns(family,
                     forms[family].size() == 1 ? std::vector<int32_t>() : std::vector(layers.begin(), layers.end()),
                     &targets);
    }
    Json group = {{"targets", std::move(targets)}};
    group.update(scheme(key.first, key.second));
    if (formats.size() > 1) group["format"] = format_name(key.first);
    config_groups[fmt::format("group_{}", config_groups.size())] = std::move(group);
  }
  return {{"quant_method", "compressed-tensors"},
          {"format", formats.size() > 1 ? "mixed-precision" : *formats.begin()},
          {"quantization_status", "compressed"},
          {"global_compression_ratio", nullptr},
          {"kv_cache_scheme", nullptr},
          {"ignore", std::move(ignore)},
          {"config_groups", std::move(config_groups)}};
}

Result<Json> make_config(const ir::MirDir& m, const FilePlan& plan, Form form, DType dtype,
                         std::vector<std::string>* notes) {
  const Path path = m.dir / ir::kSourceConfig;
  std::error_code ec;
  if (!std::filesystem::exists(path, ec))
    return bad_input(
        "{}: is missing: an earlier version of metainfer made this MIR; export the checkpoint again, or put its "
        "config.json there",
        path.string());
  MI_TRY(Json c, read_json(path));
  if (!c.is_object()) return bad_input("{}: expected an object", path.string());
  std::vector<Json*> places = {&c};  // a wrapper keeps the text model's values one level down
  bool tied = !plan.tied;
  if (plan.recipe) {
    for (const std::string& key : plan.recipe->text_config)
      if (c.contains(key) && c[key].is_object()) places.push_back(&c[key]);
    MI_TRY(model::Config known, model::Config::create(c, path.string(), plan.recipe->keys, plan.recipe->text_config));
    MI_TRY(const Json said, known.value("tied"));
    MI_TRY(const bool given, known.is_given("tied"));
    if (given && said.is_boolean()) tied = said.get<bool>();
  }
  const char* name = dtype == DType::kF32 ? "float32" : dtype == DType::kF16 ? "float16" : "bfloat16";
  for (Json* place : places) {
    place->erase("quantization_config");
    if (tied != plan.tied) (*place)["tie_word_embeddings"] = plan.tied;
    for (const char* key : {"torch_dtype", "dtype"})
      if (place->contains(key)) (*place)[key] = name;
  }
  // Every version of transformers reads the older name.
  if (!c.contains("torch_dtype") && !c.contains("dtype")) c["torch_dtype"] = name;
  if (!c.contains("model_type")) c["model_type"] = m.graph.info.model_type;
  if (!c.contains("architectures"))
    notes->push_back(
        "config.json has no architectures, which vLLM wants; transformers finds the model by its model_type");
  if (c.contains("auto_map"))
    notes->push_back("config.json has auto_map: copy the Python files that it names from the source checkpoint");
  if (form == Form::kCompressedTensors) c["quantization_config"] = quantization_config(plan.modules, plan.skipped);
  return c;
}

}  // namespace mi::tools::hf
