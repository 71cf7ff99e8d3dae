#include <fmt/format.h>

#include "base/json.h"
#include "cli/command.h"
#include "compiler/build.h"
#include "ir/pipeline.h"
#include "tools/build_config.h"
#include "tools/check_text.h"
#include "tools/expert_replay.h"
#include "tools/verify_passes.h"

namespace mi::cli {
namespace {

struct Flags {
  std::string config, model, output, target = "cpu", level = "O2", precision, profile;
  std::vector<std::string> disabled, allowed;
  int64_t seq = 0, batch = 32;
  bool verify = false, force = false, strict = false, json = false, list = false;
};

Result<int> run(const Flags& f, bool level_given) {
  if (f.list) {
    for (const ir::Pass& p : ir::passes()) fmt::print("{:<20} O{}  {}\n", p.name, p.min_opt_level, p.what);
    return 0;
  }
  if (f.model.empty() || f.output.empty()) return fail(ErrorCode::kUsage, "--model and --output are required");
  compiler::BuildOptions o;
  o.model = f.model;
  o.output = f.output;
  o.target = f.target;
  if (!f.config.empty()) {
    MI_TRY(const ir::MirDir mir, ir::MirDir::open(o.model));
    MI_TRY_VOID(tools::load_build_config(f.config, mir.graph, &o));
  }
  // A flag has the last word; lists are added up.
  if (level_given || f.config.empty()) o.opt_level = f.level.back() - '0';
  if (!f.precision.empty()) o.precision = f.precision;
  o.disabled_passes.insert(o.disabled_passes.end(), f.disabled.begin(), f.disabled.end());
  o.force = f.force;
  o.strict = o.strict || f.strict;
  o.allowed_fallbacks.insert(o.allowed_fallbacks.end(), f.allowed.begin(), f.allowed.end());
  o.expert_profile = f.profile;
  o.replay_order = tools::replay_order;
  o.plan_seq_len = f.seq;
  o.plan_batch = f.batch;
  MI_TRY_VOID(tools::check_text(o.model / "tokenizer", "export the model again from an intact checkpoint"));
  if (f.verify) {
    tools::PassesOptions p;
    p.model = f.model;
    p.precision = o.precision;
    p.rules = o.rules;
    MI_TRY(const tools::PassesReport checked, tools::verify_passes(p));
    if (!checked.ok()) {
      fmt::print("{}", tools::passes_text(checked));
      return 1;
    }
    o.appendix = tools::passes_html(checked);
  }
  MI_TRY(const compiler::BuildReport r, compiler::build_engine(o));
  fmt::print(stderr, "{}", r.shapes);
  if (f.json)
    fmt::print("{}\n", dump_json(compiler::report_json(r), 1));
  else
    fmt::print("{}", compiler::report_text(r));
  return 0;
}

}  // namespace

Command add_build(CLI::App& parent) {
  auto f = std::make_shared<Flags>();
  CLI::App* app = parent.add_subcommand("build", "compile a MIR into an engine: fuse, plan memory, pack weights");
  app->add_option("--model", f->model, "MIR directory, from metainfer export or quantize");
  app->add_option("--output", f->output, "new engine directory");
  app->add_option("--config", f->config, "options in a file (YAML), also what is fused and how experts are grouped; see the example below");
  app->add_option("--target", f->target, "what it runs on: cpu")->capture_default_str();
  CLI::Option* const level = app->add_option("--opt-level", f->level, "O0: the graph as it is; O1, O2: fused")
      ->check(CLI::IsMember({"O0", "O1", "O2"}))
      ->capture_default_str();
  app->add_option("--precision", f->precision, "float matrices: fp32 or bf16 (default: as the model has them)")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  app->add_option("--expert-profile", f->profile,
                  "which experts text chooses (written by profile --experts): experts that are chosen together are stored together, where that "
                  "promises anything; answers stay the same");
  app->add_option("--disable-pass", f->disabled, "leave a pass out; may be repeated; --list-passes names them");
  app->add_option("--max-seq-len", f->seq,
                  "tokens per sequence in the printed KV plan (default: 4096; more than the model's limit means that)");
  app->add_option("--max-batch-size", f->batch, "sequences in the printed KV plan")->capture_default_str();
  app->add_flag("--strict", f->strict, "fail when an op of an int8 model is outside the int8 path, or one of any model on a slower kernel than there could be");
  app->add_option("--allow-fallback", f->allowed, "with --strict: but not for weights of this name (attn.o.weight, \"mlp.*\"); may be repeated");
  app->add_flag("--verify-passes", f->verify, "first check that no pass changes what the model says (verify --passes); the table goes into report.html");
  app->add_flag("--force", f->force, "replace an existing engine");
  app->add_flag("--list-passes", f->list, "print the passes and stop");
  app->add_flag("--json", f->json, "print the report as JSON");
  app->footer("Examples:\n  metainfer build --model mini-m3-w8a8 --target cpu --opt-level O2 --output mini-m3-engine\n"
              "  metainfer profile --engine mini-m3-engine --experts experts.json --data requests.jsonl\n"
              "  metainfer build --model mini-m3-w8a8 --output mini-m3-engine-2 --expert-profile experts.json\n"
              "A file for --config (fusion.ignore: names of weights or results, or re: patterns; every key may be absent):\n"
              "  build:\n"
              "    disable_passes: [fuse_qkv]\n"
              "    fusion: {ignore: [\"re:layers\\\\.0\\\\.attn\"], same_precision_only: true, debug_shapes: true}\n"
              "    expert_groups:\n"
              "      - {layers: [1, 2], size: 8}\n"
              "      - {layers: [3], members: [[0, 2, 4, 6], [1, 3, 5, 7]]}");
  return {app, [f, level]() { return run(*f, level->count() > 0); }};
}

}  // namespace mi::cli
