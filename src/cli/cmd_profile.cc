#include <fmt/format.h>

#include "cli/command.h"
#include "cli/number_list.h"
#include "hw/process_memory.h"
#include "quant/calibration_data.h"
#include "tools/profile/expert_profile.h"
#include "tools/profile/report.h"
#include "tools/session.h"

namespace mi::cli {
namespace {

struct Flags {
  EngineFlags engine;
  std::string prefill = "512", batch = "1,8", html, trace, experts, data;
  int64_t tokens = 8192;
  tools::ProfileOptions profile;
  int64_t top = 12;
  bool json = false, memory = false, no_probe = false, force = false;
};

// Which experts real text chooses, into a file.
Result<int> experts(const Flags& f) {
  constexpr int64_t kLength = 512;  // of a sequence at most
  MI_TRY_VOID(check_output(f.experts, f.force));
  tools::SessionOptions so = session_options(f.engine);
  so.max_batch_size = 1;
  so.kv_tokens = kLength;
  so.quiet = f.json;
  MI_TRY(const tools::Session s, tools::open_session(so));
  const artifact::ModelFacts& m = s.engine->manifest().model;
  MI_TRY(const quant::CalibrationSet text,
         quant::load_calibration({f.data, f.tokens, std::min(kLength, m.max_positions > 0 ? m.max_positions : kLength), m.vocab}, s.text.tokenizer.get(), s.text.chat.get()));
  tools::ExpertProfile p = tools::record_experts(*s.engine, text.sequences, f.tokens);
  p.source = text.source;
  if (p.layers.empty()) return fail(ErrorCode::kUsage, "{}: this model has no experts", f.engine.engine);
  if (p.tokens < 2) return bad_input("{}: {} tokens are too few to learn from", text.source, p.tokens);
  MI_TRY_VOID(artifact::write_expert_profile(p, f.experts, f.force));
  fmt::print("{}", tools::expert_evidence_text(p, tools::weigh_experts(p)) +
                       tools::order_evidence_text(compiler::learn_order(p, s.engine->manifest())));
  return 0;
}

Result<int> run(Flags& f) {
  if (!f.experts.empty()) return experts(f);
  if (!f.data.empty()) return fail(ErrorCode::kUsage, "--data is text for --experts FILE");
  MI_TRY(f.profile.prefill, parse_numbers(f.prefill, "--prefill"));
  MI_TRY(f.profile.batch, parse_numbers(f.batch, "--batch"));
  for (const std::string& path : {f.html, f.trace})
    if (!path.empty()) MI_TRY_VOID(check_output(path, f.force));
  if (!f.html.empty() && f.html == f.trace)
    return fail(ErrorCode::kUsage, "--html and --chrome-trace name the same file {}", f.html);
  MI_TRY_VOID(tools::check_profile(f.engine.engine, f.profile));
  const int threads = f.engine.threads > 0 ? f.engine.threads : hw::advise_threads().threads;
  tools::Machine machine;
  {
    hw::ThreadPool pool(threads);
    MI_TRY(machine, tools::describe_machine(pool, !f.no_probe));
  }
  const bool fresh_peak = hw::reset_peak_memory();
  tools::SessionOptions so = session_options(f.engine);
  so.threads = threads;
  so.max_batch_size = 1;
  so.kv_tokens = tools::profile_kv_tokens(f.profile);
  so.kv_measured = true;
  so.quiet = f.json;
  MI_TRY(const tools::Session s, tools::open_session(so));
  tools::Profile p = tools::run_profile(*s.engine, machine, f.profile);
  if (f.memory) {
    p.memory = tools::memory_report(*s.engine, s.memory, s.runtime_bytes);
    if (!f.no_probe && !fresh_peak)
      p.memory->notes.push_back(
          "the engine's own peak: this kernel does not reset it, so measuring the limits counts too (--no-probe leaves "
          "that out)");
  }
  if (!f.html.empty()) MI_TRY_VOID(write_output(f.html, f.force, tools::profile_html(p)));
  if (!f.trace.empty()) MI_TRY_VOID(write_output(f.trace, f.force, dump_json(tools::profile_trace(p)) + "\n"));
  if (f.json)
    fmt::print("{}\n", dump_json(tools::profile_json(p)));
  else
    fmt::print("{}", tools::profile_text(p, size_t(f.top)));
  return 0;
}

}  // namespace

Command add_profile(CLI::App& parent) {
  auto f = std::make_shared<Flags>();
  CLI::App* app =
      parent.add_subcommand("profile", "where the time goes: per operation and layer, beside the machine's limits");
  add_engine_flags(*app, &f->engine, false);
  app->add_option("--prefill", f->prefill, "prompt lengths")->capture_default_str()->type_name(kNumberList);
  app->add_option("--decode", f->profile.decode, "steps of decoding, after prompts of 128")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app->add_option("--batch", f->batch, "sequences that decode together")->capture_default_str()->type_name(kNumberList);
  app->add_option("--rounds", f->profile.rounds, "times to run each, the fastest is reported")
      ->check(CLI::Range(1, 100))
      ->capture_default_str();
  app->add_option("--top", f->top, "instructions to list")->check(CLI::Range(0, 100000))->capture_default_str();
  app->add_flag("--memory", f->memory, "also planned against resident memory");
  app->add_option("--experts", f->experts,
                  "instead: record which experts text chooses, into a file for --expert-profile, and print what that is "
                  "worth");
  app->add_option("--data", f->data,
                  "text for --experts, like the traffic to come: a text file, or jsonl of {\"text\"}, {\"messages\"} or "
                  "{\"ids\"} (default: built in)");
  app->add_option("--tokens", f->tokens, "tokens of it to look at")->check(CLI::Range(2, 1 << 22))->capture_default_str();
  app->add_flag("--no-probe", f->no_probe, "do not measure the machine's limits (about a second)");
  app->add_flag("--json", f->json, "print one JSON object");
  app->add_option("--html", f->html, "write a page with plots");
  app->add_option("--chrome-trace", f->trace, "write one step of each scenario for chrome://tracing or Perfetto");
  app->add_flag("--force", f->force, "replace existing files of --html, --chrome-trace and --experts");
  app->footer(
      "Examples:\n"
      "  metainfer profile --engine mini-m3-engine\n"
      "  metainfer profile --engine mini-m3-engine --batch 32 --html profile.html --chrome-trace step.json --memory\n"
      "  metainfer profile --engine mini-m3-engine --experts experts.json --data requests.jsonl");
  return {app, [f]() { return run(*f); }};
}

}  // namespace mi::cli
