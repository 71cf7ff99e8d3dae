#include <fmt/format.h>

#include "base/json.h"
#include "cli/command.h"
#include "model/export.h"
#include "tools/check_text.h"

namespace mi::cli {
namespace {

struct Flags {
  std::string model_type, model_dir, output, name, family_file;
  uint64_t seed = 0;
  bool force = false, explain = false, tie = false, dummy = false, list = false, json = false;
};

Json report_json(const model::ExportReport& r) {
  Json skipped = Json::object();
  for (const auto& [reason, count] : r.skipped) skipped[reason] = count;
  Json dequantized = Json::array();
  for (const auto& d : r.dequantized)
    dequantized.push_back(
        {{"kind", d.kind}, {"format", d.format}, {"dtype", dtype_name(d.dtype)}, {"tensors", d.tensors}});
  return {{"name", r.info.name},
          {"family", r.family},
          {"model_type", r.info.model_type},
          {"layers", r.info.layers},
          {"hidden", r.info.hidden},
          {"source_tensors", r.source_tensors},
          {"used_tensors", r.used_tensors},
          {"skipped", skipped},
          {"dequantized", dequantized},
          {"parameters", r.parameters},
          {"bytes", r.bytes},
          {"tokenizer", r.has_tokenizer},
          {"chat_template", r.has_chat_template},
          {"notes", r.notes},
          {"seconds", r.seconds}};
}

Result<int> run(const Flags& f) {
  if (f.list) {
    for (const std::string& t : model::known_model_types()) fmt::print("{}\n", t);
    return 0;
  }
  if (f.model_dir.empty()) return fail(ErrorCode::kUsage, "--model-dir is required");
  if (f.output.empty() && !f.explain)
    return fail(ErrorCode::kUsage, "--output is required (or --explain alone, which writes nothing)");
  model::ExportOptions o;
  o.model_dir = f.model_dir;
  o.output = f.output;
  o.model_type = f.model_type;
  o.name = f.name;
  o.family_file = f.family_file;
  o.force = f.force;
  o.explain = f.explain;
  o.tie = f.tie;
  o.dummy_weights = f.dummy;
  o.seed = f.seed;
  MI_TRY_VOID(tools::check_text(o.model_dir, "fetch this file again"));
  MI_TRY(const model::ExportReport r, model::export_model(o));
  if (f.json) {
    fmt::print("{}\n", dump_json(report_json(r), 1));
    return 0;
  }
  if (f.explain) fmt::print("{}", r.explain);
  fmt::print("{}", model::report_text(r));
  return 0;
}

}  // namespace

Command add_export(CLI::App& parent) {
  auto f = std::make_shared<Flags>();
  CLI::App* app = parent.add_subcommand("export", "import a checkpoint: config, weights, tokenizer -> MIR");
  app->add_option("--model-dir", f->model_dir, "folder with config.json and *.safetensors, or a .gguf file");
  app->add_option("--output", f->output, "new MIR directory");
  app->add_option("--model-type", f->model_type,
                  "model type (default: config.json's); hyphens and underscores are equal");
  app->add_option("--name", f->name, "served model name (default: the folder's name)");
  app->add_option("--family-file", f->family_file, "recipe (YAML) to use instead of the built-in ones");
  app->add_flag("--explain", f->explain, "print every config value with its source and every tensor mapping");
  app->add_flag("--tie", f->tie, "use the embedding as output head when lm_head.weight is missing");
  app->add_flag("--dummy-weights", f->dummy, "seeded random weights from config.json alone, for benchmarks of a shape");
  app->add_option("--seed", f->seed, "of --dummy-weights")->capture_default_str();
  app->add_flag("--force", f->force, "replace an existing output");
  app->add_flag("--list-models", f->list, "print the known model types and stop");
  app->add_flag("--json", f->json, "print the report as JSON");
  app->footer(
      "Examples:\n"
      "  metainfer export --model-type minimax-m3 --model-dir models/mini-m3 --output mini-m3-mir\n"
      "  metainfer export --model-dir Qwen3-30B-A3B-Q4_K_M.gguf --output qwen3-mir\n"
      "  metainfer export --model-dir qwen3-shape --dummy-weights --output qwen3-dummy");
  return {app, [f]() { return run(*f); }};
}

}  // namespace mi::cli
