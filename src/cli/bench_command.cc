#include <fmt/format.h>

#include "base/html.h"
#include "base/util.h"
#include "cli/command.h"
#include "cli/number_list.h"
#include "tools/bench/compare.h"
#include "tools/bench/history.h"
#include "tools/bench/report.h"
#include "tools/bench/run.h"

namespace mi::cli {
namespace {

struct Flags {
  EngineFlags engine;
  std::string prefill = "512", decode = "128", batch = "8";
  int rounds = 0;
  bool json = false, no_probe = false, sweep = false, force = false, other_engine = false;
  std::string save, baseline, against, against_engine, history;
  double threshold = 5;
};

struct HistoryFlags {
  std::string file, html;
  int64_t last = 20;
  bool force = false;
};

constexpr int kRounds = 3, kGateRounds = 7;  // a gate needs enough rounds for an interval

void print_json(const Json& j) { fmt::print("{}\n", dump_json(j)); }

void print_record(const tools::BenchRecord& r, const std::vector<std::string>& notes, bool json) {
  if (json) {
    print_json({{"version", r.version}, {"load_s", r.load_s}});
    print_json({{"machine", tools::machine_json(r.machine)}});
    for (size_t i = 0; i < r.rows.size(); ++i) print_json(tools::bench_json(r.rows[i], &r.shares[i]));
    print_json({{"memory", {{"peak_bytes", r.peak_bytes ? Json(*r.peak_bytes) : Json(nullptr)}}}});
    for (const std::string& n : notes) print_json({{"note", n}});
    return;
  }
  fmt::print("{}load     {}\n", tools::machine_text(r.machine), human_seconds(r.load_s));
  if (r.peak_bytes) fmt::print("memory   {} at most\n", human_bytes(double(*r.peak_bytes)));
  for (const std::string& n : notes) fmt::print("{}\n", n);
  fmt::print("{}", tools::bench_table(r.rows, r.shares));
}

// True: nothing regressed.
bool print_comparison(const tools::Comparison& c, bool json) {
  if (json)
    print_json(tools::comparison_json(c));
  else
    fmt::print("{}", tools::comparison_text(c));
  return !c.regressed();
}

Result<int> sweep(const Flags& f, const tools::BenchOptions& o) {
  MI_TRY(const tools::SweepOutcome r, tools::run_bench_sweep(o));
  if (f.json) {
    print_json({{"load_s", r.load_s}});
    print_json({{"machine", tools::machine_json(r.machine)}});
    for (const tools::SweepCell& c : r.cells) print_json(tools::sweep_json(c));
  } else {
    fmt::print("{}load     {}\n{}", tools::machine_text(r.machine), human_seconds(r.load_s),
               tools::sweep_table(r.cells));
  }
  return 0;
}

Result<int> run(const Flags& f, const CLI::App& app) {
  if (f.engine.engine.empty()) return fail(ErrorCode::kUsage, "--engine is required");
  if (f.sweep)
    for (const char* other :
         {"--prefill", "--decode", "--batch", "--save", "--baseline", "--against", "--history", "--threshold", "--force"})
      if (app.count(other) > 0)
        return fail(ErrorCode::kUsage,
                    "--sweep measures a matrix of its own, for reading, and cannot be combined with {}", other);
  if (f.baseline.empty() && f.against.empty() && app.count("--threshold") > 0)
    return fail(ErrorCode::kUsage, "--threshold is for a comparison: give --baseline or --against");
  if (!f.save.empty() && f.save == f.history)
    return fail(ErrorCode::kUsage, "--save and --history name the same file {}", f.save);
  tools::BenchOptions o;
  o.session = session_options(f.engine);
  o.session.quiet = f.json;
  o.probe = !f.no_probe;
  MI_TRY(o.cases.prefill, parse_numbers(f.prefill, "--prefill"));
  MI_TRY(o.cases.decode, parse_numbers(f.decode, "--decode"));
  MI_TRY(o.cases.batch, parse_numbers(f.batch, "--batch"));
  const bool gate = !f.save.empty() || !f.baseline.empty() || !f.against.empty();
  o.rounds = f.rounds > 0 ? f.rounds : gate ? kGateRounds : kRounds;
  if (f.sweep) return sweep(f, o);
  if (gate && o.rounds < tools::kFewestRounds)
    return fail(ErrorCode::kUsage, "--rounds {}: figures that are to be compared need at least {}", o.rounds,
                tools::kFewestRounds);

  if (!f.against.empty() && f.engine.expert_cache > 0)
    return fail(ErrorCode::kUsage, "--against compares engines in memory: leave --expert-cache out");

  // Whatever can be refused is refused before minutes of measuring.
  tools::CompareOptions c;
  c.threshold = f.threshold / 100;
  c.other_engine = f.other_engine;
  std::optional<tools::BenchRecord> baseline;
  std::string baseline_name;
  if (!f.baseline.empty()) {
    MI_TRY(baseline, tools::read_record(f.baseline));
    baseline_name = fmt::format("{} ({}, {})", f.baseline, baseline->version, baseline->when);
    o.before_measuring = [&](const tools::BenchRecord& now) {
      return tools::check_comparable(now, *baseline, baseline_name, c);
    };
  }
  if (!f.history.empty()) MI_TRY_VOID(tools::check_history(f.history));
  if (!f.save.empty()) MI_TRY_VOID(check_output(f.save, f.force));

  tools::BenchOutcome out;
  std::vector<tools::Comparison> comparisons;
  if (f.against.empty()) {
    MI_TRY(out, tools::run_bench(o));
  } else {
    std::unique_ptr<Progress> progress;
    if (!f.json) progress = std::make_unique<Progress>("bench, rounds in turns", uint64_t(o.rounds), false);
    MI_TRY(tools::AgainstOutcome a, tools::run_bench_against(o, f.against, f.against_engine, [&](int) {
             if (progress) progress->advance(1);
           }));
    if (progress) progress->done();
    out = std::move(a.bench);
    comparisons.push_back(tools::compare_rounds(out.record.rows, a.theirs,
                                                fmt::format("{} ({}), in turns", f.against, a.their_version), c));
  }
  print_record(out.record, out.notes, f.json);
  if (!f.save.empty()) MI_TRY_VOID(tools::write_record(out.record, f.save, f.force));
  if (!f.history.empty()) MI_TRY_VOID(tools::append_history(f.history, out.record));
  if (baseline) {
    MI_TRY(tools::Comparison b, tools::compare_records(out.record, *baseline, baseline_name, c));
    comparisons.push_back(std::move(b));
  }
  bool good = true;
  for (const tools::Comparison& each : comparisons) good &= print_comparison(each, f.json);
  return good ? 0 : 1;
}

Result<int> show_history(const HistoryFlags& f, const CLI::App& app) {
  for (const CLI::Option* o : app.get_options())
    if (o->count() > 0)
      return fail(ErrorCode::kUsage, "bench history shows what was measured: {} is none of its flags", o->get_name());
  MI_TRY(const auto all, tools::read_history(f.file));
  if (all.empty()) return bad_input("{}: holds no runs yet; metainfer bench --history {} adds one", f.file, f.file);
  fmt::print("{}", tools::history_text(all, size_t(f.last)));
  if (f.html.empty()) return 0;
  MI_TRY_VOID(write_output(f.html, f.force, tools::history_html(all, "metainfer bench: history")));
  return 0;
}

}  // namespace

Command add_bench(CLI::App& parent) {
  auto f = std::make_shared<Flags>();
  auto h = std::make_shared<HistoryFlags>();
  CLI::App* app = parent.add_subcommand(
      "bench", "measure prompt processing, one stream and many streams; compare with earlier runs");
  add_engine_flags(*app, &f->engine, false);
  app->get_option("--engine")->required(false);  // 'bench history' needs none
  app->add_option("--prefill", f->prefill, "prompt lengths")->capture_default_str()->type_name(kNumberList);
  app->add_option("--decode", f->decode, "tokens of one stream after a prompt of 128")
      ->capture_default_str()
      ->type_name(kNumberList);
  app->add_option("--batch", f->batch, "streams at once: prompt 128, 64 tokens each")
      ->capture_default_str()
      ->type_name(kNumberList);
  app->add_option("--rounds", f->rounds,
                  "measurements of each, the median is reported (default: 3, or 7 to save or compare)")
      ->check(CLI::Range(1, 100));
  app->add_flag("--json", f->json, "one JSON object per line");
  app->add_flag("--no-probe", f->no_probe, "do not measure the machine's limits (about a second)");
  app->add_flag("--sweep", f->sweep,
                "instead: prompts of 1, 8, 64, 512 times batches of 1, 4, 16, naming cells that are slower per token "
                "than a smaller one");
  app->add_option("--save", f->save, "write this run to a file, to be a baseline");
  CLI::Option* const baseline =
      app->add_option("--baseline", f->baseline,
                      "compare with a file that --save wrote on this machine; exit code 1 on a regression");
  CLI::Option* const against =
      app->add_option("--against", f->against,
                      "compare with another metainfer program, round by round in turns, both with these flags; exit code 1 "
                      "on a regression");
  app->add_option("--against-engine", f->against_engine, "engine for that program (default: the same)")->needs(against);
  app->add_option("--threshold", f->threshold, "percent that a figure may surely be worse by")
      ->check(CLI::Range(0.0, 90.0))
      ->capture_default_str();
  app->add_flag("--other-engine", f->other_engine, "compare although the engine is not the baseline's")->needs(baseline);
  app->add_option("--history", f->history, "append this run to a file, one line of JSON");
  app->add_flag("--force", f->force, "replace an existing file of --save");
  CLI::App* history = app->add_subcommand("history", "show the runs in a file that --history wrote");
  history->add_option("file", h->file, "the file")->required();
  history->add_option("--html", h->html, "write a page with plots");
  history->add_option("--last", h->last, "newest runs to print")->check(CLI::Range(1, 1 << 20))->capture_default_str();
  history->add_flag("--force", h->force, "replace an existing page");
  app->footer(
      "Examples:\n"
      "  metainfer bench --engine mini-m3-engine --prefill 128,512 --decode 128 --batch 8,32\n"
      "  metainfer bench --engine mini-m3-engine --save base.json --history runs.jsonl\n"
      "  metainfer bench --engine mini-m3-engine --baseline base.json\n"
      "  metainfer bench --engine mini-m3-engine --against build/old/metainfer\n"
      "  metainfer bench history runs.jsonl --html runs.html");
  return {app, [f, h, app, history]() { return history->parsed() ? show_history(*h, *app) : run(*f, *app); }};
}

}  // namespace mi::cli
