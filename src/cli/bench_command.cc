#include <fmt/format.h>

#include <chrono>

#include "base/json.h"
#include "base/version.h"
#include "cli/command.h"
#include "tools/bench.h"

namespace mi::cli {
namespace {

struct Flags {
  EngineFlags engine;
  tools::BenchOptions bench;
  std::string prefill = "512", decode = "128", batch = "8";
  bool json = false;
};

Result<std::vector<int64_t>> numbers(const std::string& list, const char* flag) {
  std::vector<int64_t> out;
  for (size_t at = 0; at < list.size();) {
    size_t end = list.find(',', at);
    if (end == std::string::npos) end = list.size();
    const std::string part = list.substr(at, end - at);
    if (part.empty() || part.size() > 9 || part.find_first_not_of("0123456789") != std::string::npos)
      return fail(ErrorCode::kUsage, "{} wants numbers separated by commas, like 128,512; found '{}'", flag, list);
    out.push_back(std::stoll(part));
    at = end + 1;
  }
  return out;
}

Result<int> run(Flags& f) {
  MI_TRY(f.bench.prefill, numbers(f.prefill, "--prefill"));
  MI_TRY(f.bench.decode, numbers(f.decode, "--decode"));
  MI_TRY(f.bench.batch, numbers(f.batch, "--batch"));
  int64_t tokens = 256;
  for (int64_t n : f.bench.prefill) tokens = std::max(tokens, n + 64);
  for (int64_t n : f.bench.decode) tokens = std::max(tokens, 128 + n + 64);
  for (int64_t n : f.bench.batch) tokens = std::max(tokens, n * 256);
  tools::SessionOptions so;
  so.engine = f.engine.engine;
  so.threads = f.engine.threads;
  so.max_batch_size = 1;
  so.max_seq_len = tokens;      // one pool that every case fits into
  so.kv_type = f.engine.kv_type;
  so.verify_checksums = !f.engine.no_checksums;
  so.weights = f.engine.weights;
  so.quiet = f.json;
  const auto start = std::chrono::steady_clock::now();
  MI_TRY(tools::Session s, tools::open_session(so));
  const double load = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (f.json) fmt::print("{}\n", dump_json(Json{{"version", std::string("metainfer ") + version()}, {"load_s", load}}));
  MI_TRY(const std::vector<tools::BenchRow> rows, tools::run_bench(s, f.bench, [&](const tools::BenchRow& r) {
           if (!f.json) return;
           fmt::print("{}\n", dump_json(tools::bench_json(r)));
           std::fflush(stdout);
         }));
  if (!f.json) fmt::print("{}", tools::bench_table(rows));
  return 0;
}

}  // namespace

Command add_bench(CLI::App& parent) {
  auto f = std::make_shared<Flags>();
  CLI::App* app = parent.add_subcommand("bench", "measure prompt processing, one stream and many streams");
  add_engine_flags(*app, &f->engine);
  app->add_option("--prefill", f->prefill, "prompt lengths")->capture_default_str();
  app->add_option("--decode", f->decode, "tokens of one stream after a prompt of 128")->capture_default_str();
  app->add_option("--batch", f->batch, "streams at once: prompt 128, 64 tokens each")->capture_default_str();
  app->add_option("--rounds", f->bench.rounds, "measurements of each, the median is reported")->check(CLI::Range(1, 100))->capture_default_str();
  app->add_flag("--json", f->json, "one JSON object per line");
  app->footer("Example:\n  metainfer bench --engine mini-m3-engine --prefill 128,512 --decode 128 --batch 8,32");
  return {app, [f]() { return run(*f); }};
}

}  // namespace mi::cli
