// libFuzzer: config.json up to the graph. The recipe is that of its model_type; where none is known, the size of the
// input picks one.
#include <algorithm>

#include "base/check.h"
#include "ir/verify.h"
#include "model/export.h"
#include "model/graph_builder.h"
#include "model/quant_scheme.h"

namespace {

using namespace mi::model;

std::string type_of(const mi::Json& j, size_t size) {
  static const std::vector<std::string> types = known_model_types();
  const auto said = mi::json_get<std::string>(j, "model_type", "fuzz");
  return said.ok() && find_recipe(*said, "fuzz").ok() ? *said : types[size % types.size()];
}

void read_scheme(Config& config) {
  auto scheme = QuantScheme::read(config, {});
  if (!scheme.ok() || !scheme->has_value()) return;
  for (const char* module : {"lm_head", "model.layers.0.mlp.gate", "model.layers.1.self_attn.q_proj"})
    if (const formats::Format* f = (*scheme)->format_of(module)) {
      MI_CHECK(!f->text().empty());
      if (!(*scheme)->supported()) continue;
      MI_CHECK(f->bits == 2 || f->bits == 4 || f->bits == 8);
      MI_CHECK(f->group >= 0 && f->block_rows >= 0 && f->block_cols >= 0);
      if (f->strategy == formats::Strategy::kBlock) MI_CHECK(f->block_rows > 0 && f->block_cols > 0);
    }
  if (!(*scheme)->supported()) MI_CHECK(!(*scheme)->refuse().message().empty());
  MI_CHECK(std::ranges::none_of((*scheme)->notes(), [](const std::string& n) { return n.empty(); }));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto json = mi::parse_json({reinterpret_cast<const char*>(data), size}, "fuzz");
  if (!json.ok()) return 0;
  const auto recipe = find_recipe(type_of(*json, size), "fuzz");
  auto config = Config::create(std::move(json).value(), "fuzz", recipe->keys, recipe->text_config);
  if (!config.ok()) return 0;
  read_scheme(*config);
  const auto arch = resolve_arch(*recipe, *config);
  if (!arch.ok()) return 0;
  MI_CHECK(int64_t(arch->layer.size()) == arch->layers);
  for (const auto& l : arch->layer) MI_CHECK(l.rope >= -1 && l.rope < int(arch->ropes.size()));
  if (arch->layers > 64) return 0;  // equal layers teach nothing and take time
  const auto graph = build_graph(*arch, size % 2 == 0, [](int32_t, const std::string&, const mi::Shape&, mi::ir::Mark) {
    return mi::Result<WeightInfo>(WeightInfo{});
  });
  MI_CHECK(graph.ok(), "{}", graph.error().message());
  (void)mi::ir::verify(*graph);
  return 0;
}
