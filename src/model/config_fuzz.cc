// libFuzzer: config.json against every built-in recipe. The first byte chooses the recipe.
#include "model/arch.h"
#include "model/export.h"
#include "model/quant_scheme.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  static const std::vector<std::string> types = mi::model::known_model_types();
  auto json = mi::parse_json({reinterpret_cast<const char*>(data) + 1, size - 1}, "fuzz");
  if (!json.ok()) return 0;
  const auto recipe = mi::model::find_recipe(types[data[0] % types.size()], "fuzz");
  auto config = mi::model::Config::create(std::move(json).value(), "fuzz", recipe->keys, recipe->text_config);
  if (!config.ok()) return 0;
  (void)mi::model::QuantScheme::read(*config);
  const auto arch = mi::model::resolve_arch(*recipe, *config);
  if (!arch.ok()) return 0;
  MI_CHECK(int64_t(arch->layer.size()) == arch->layers);
  for (const auto& l : arch->layer) MI_CHECK(l.rope >= -1 && l.rope < int(arch->ropes.size()));
  return 0;
}
