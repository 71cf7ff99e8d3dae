#include <fmt/format.h>

#include "base/json.h"
#include "cli/command.h"
#include "tools/verify.h"
#include "tools/verify_passes.h"

namespace mi::cli {
namespace {

struct Flags {
  std::string engine, reference, model, data, kv_type, attention_order = "auto";
  int threads = 0;
  tools::VerifyLimits limits;
  bool json = false, passes = false;
};

Result<int> run_passes(const Flags& f) {
  if (f.model.empty() || !f.engine.empty() || !f.reference.empty())
    return fail(ErrorCode::kUsage, "--passes takes --model MIR alone: it builds the engines itself");
  tools::PassesOptions o;
  o.model = f.model;
  o.data = f.data;
  o.threads = f.threads;
  o.kv_type = f.kv_type;
  o.attention_order = f.attention_order;
  MI_TRY(const tools::PassesReport r, tools::verify_passes(o));
  if (f.json)
    fmt::print("{}\n", dump_json(tools::passes_json(r), 1));
  else
    fmt::print("{}", tools::passes_text(r));
  return r.ok() ? 0 : 1;
}

Result<int> run(Flags& f, bool logits_given, bool hidden_given) {
  if (f.passes) return run_passes(f);
  if (int(!f.engine.empty()) + int(!f.reference.empty()) + int(!f.model.empty()) != 2)
    return fail(ErrorCode::kUsage, "give two of --engine, --model MIR and --reference FILE: they are compared");
  if (!f.data.empty() && !f.reference.empty())
    return fail(ErrorCode::kUsage, "--data is text to run; a --reference has its own inputs: leave one out");
  f.limits.given_logits = logits_given;
  f.limits.given_hidden = hidden_given;
  tools::SessionOptions so;
  so.engine = f.engine;
  so.threads = f.threads;
  so.max_batch_size = 1;
  so.kv_type = f.kv_type;
  so.attention_order = f.attention_order;
  tools::VerifyReport r;
  if (f.engine.empty()) {
    MI_TRY(r, tools::verify_tensors(f.model, f.reference, so, f.limits));
  } else {
    so.check = [&f](const text::ModelText&) { return f.reference.empty() ? tools::check_mir(f.model) : tools::check_reference(f.reference); };
    MI_TRY(const tools::Session s, tools::open_session(so));
    MI_TRY(r, f.reference.empty() ? tools::verify_mir(s, f.engine, f.model, f.data, f.limits)
                                  : tools::verify_reference(s, f.reference, f.limits));
  }
  if (f.json)
    fmt::print("{}\n", dump_json(tools::verify_json(r), 1));
  else
    fmt::print("{}", tools::verify_text(r));
  return r.ok() ? 0 : 1;
}

}  // namespace

Command add_verify(CLI::App& parent) {
  auto f = std::make_shared<Flags>();
  CLI::App* app = parent.add_subcommand(
      "verify",
      "compare an engine with a reference: weights, layer outputs, routing, logits, greedy tokens; or a model's weights");
  app->add_option("--engine", f->engine, "engine directory");
  app->add_option("--reference", f->reference,
                  "safetensors file with recorded inputs and outputs, and weights (dequant.NAME) for --model");
  app->add_option("--model", f->model, "MIR directory: its matrices are compared, and its plain float graph is run");
  app->add_option("--data", f->data,
                  "text or .jsonl that engine and model run, some sequences of it (default: built in, which is strange to a model of other text)");
  add_threads(*app, &f->threads);
  add_cache_flags(*app, &f->kv_type, &f->attention_order);
  auto* logits = app->add_option("--logits-max-abs", f->limits.logits_max_abs,
                                 "float engines: largest difference of a logit (default: the reference's own)")
                     ->check(at_least_zero());
  auto* hidden = app->add_option("--hidden-max-abs", f->limits.hidden_max_abs,
                                 "float engines: largest difference of a layer's output")
                     ->check(at_least_zero());
  app->add_option("--max-kl", f->limits.max_kl,
                  "int8 engines: mean KL divergence per token (default: 0.02, with 4-bit weights 0.25)")
      ->check(at_least_zero());
  app->add_option("--max-layer-deviation", f->limits.max_layer_deviation,
                  "int8 engines: relative rms difference of a layer's output, and of what it adds alone (default: 0.25 and 0.15, with 4-bit "
                  "weights 0.4)")
      ->check(at_least_zero());
  app->add_flag("--passes", f->passes,
                "of --model: build it without passes, with one more each time, and with all but one; compare logits, tokens and the first layer that differs");
  app->add_flag("--json", f->json, "print the rows as JSON");
  app->footer(
      "Exit code 0: within limits; 1: not, and the first difference is named.\nExamples:\n"
      "  metainfer verify --engine E --reference golden.safetensors\n"
      "  metainfer verify --engine mini-m3-engine --model mini-m3-mir\n"
      "  metainfer verify --model mini-m3-mir --reference expected.safetensors\n"
      "  metainfer verify --model mini-m3-w8a8 --passes");
  return {app, [f, logits, hidden]() { return run(*f, logits->count() > 0, hidden->count() > 0); }};
}

}  // namespace mi::cli
