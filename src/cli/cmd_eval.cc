#include <fmt/format.h>

#include "artifact/reader.h"
#include "base/json.h"
#include "cli/command.h"
#include "tools/eval.h"

namespace mi::cli {
namespace {

struct Flags {
  std::vector<std::string> engines, names;
  tools::EvalOptions eval;
  std::string data, text, reference, kv_type, attention_order = "auto";
  int threads = 0;
  int64_t batch = 32;
  double max_drop = -1;
  bool json = false;
};

Result<int> run(Flags& f) {
  if (!f.names.empty() && f.names.size() != f.engines.size())
    return fail(ErrorCode::kUsage, "--name must be given once per --engine, or not at all");
  if (f.max_drop >= 0 && f.engines.size() < 2)
    return fail(ErrorCode::kUsage, "--max-drop compares engines: give --engine twice, or leave it out");
  // A later engine is not missed after the first one's minutes.
  for (size_t i = 1; i < f.engines.size(); ++i) {
    std::error_code ec;
    if (!std::filesystem::exists(Path(f.engines[i]) / "engine.json", ec))
      return bad_input("{}: no engine (no engine.json in it); give what metainfer build wrote", f.engines[i]);
  }
  f.eval.data = f.data;
  f.eval.text = f.text;
  f.eval.reference = f.reference;
  std::vector<std::pair<std::string, tools::EvalResult>> columns;
  // The last engine should not turn out to be none after the first one's answers.
  for (const std::string& e : f.engines) MI_TRY_VOID(artifact::open_artifact(e));
  for (size_t i = 0; i < f.engines.size(); ++i) {
    tools::SessionOptions so;
    so.engine = f.engines[i];
    so.threads = f.threads;
    so.max_batch_size = f.batch;
    so.max_seq_len = 1024;
    so.kv_type = f.kv_type;
    so.attention_order = f.attention_order;
    so.check = [&f](const text::ModelText& t) { return tools::check_eval(t, f.eval); };
    MI_TRY(const tools::Session s, tools::open_session(so));
    MI_TRY(tools::EvalResult r, tools::run_eval(s, f.eval));
    columns.emplace_back(f.names.empty() ? s.engine->manifest().model.precision : f.names[i], std::move(r));
  }
  if (f.json) {
    if (columns.size() == 1) {
      fmt::print("{}\n", dump_json(tools::eval_json(columns[0].second)));
    } else {
      Json j = Json::object();
      for (const auto& [name, r] : columns) j[name] = tools::eval_json(r);
      fmt::print("{}\n", dump_json(j));
    }
  } else {
    fmt::print("{}", tools::eval_table(columns));
  }
  if (f.max_drop >= 0) {
    for (size_t i = 1; i < columns.size(); ++i)
      for (const auto& [group, r] : columns[i].second.groups) {
        const double drop = columns[0].second.groups.at(group).accuracy() - r.accuracy();
        if (drop <= f.max_drop / 100 + 1e-12) continue;
        fmt::print(stderr, "{}: group {} loses {:.2f} points, more than {:.2f}\n", columns[i].first, group, 100 * drop,
                   f.max_drop);
        return 1;
      }
  }
  return 0;
}

}  // namespace

Command add_eval(CLI::App& parent) {
  auto f = std::make_shared<Flags>();
  CLI::App* app = parent.add_subcommand("eval", "task accuracy per group and perplexity, one column per engine");
  app->add_option("--engine", f->engines, "engine directory; repeat to compare side by side")->required();
  app->add_option("--name", f->names, "column title per engine (default: its precision)");
  app->add_option("--data", f->data, "eval.jsonl: items with group, messages, answer, check")->required();
  app->add_option("--text", f->text, "plain text for perplexity (default: text_ppl.txt beside --data)");
  app->add_option("--reference", f->reference, "JSON with recorded greedy answers to compare token by token");
  app->add_option("--limit", f->eval.limit, "items per group, 0: all")
      ->check(CLI::Range(0, 1 << 30))
      ->capture_default_str();
  app->add_option("--max-tokens", f->eval.max_tokens, "longest answer")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  app->add_option("--max-drop", f->max_drop,
                  "exit with 1 when a group of a later engine is more points below the first engine's")
      ->check(at_least_zero());
  add_threads(*app, &f->threads);
  app->add_option("--max-batch-size", f->batch, "answers generated at once")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  add_cache_flags(*app, &f->kv_type, &f->attention_order);
  app->add_flag("--json", f->json, "print JSON: {\"accuracy\": {group: 0..1}, \"text_nll_per_token\": x, ...}");
  app->footer(
      "Example:\n"
      "  metainfer eval --engine mini-m3-float --engine mini-m3-int8 --data models/mini-m3-eval/eval.jsonl --max-drop "
      "2");
  return {app, [f]() { return run(*f); }};
}

}  // namespace mi::cli
