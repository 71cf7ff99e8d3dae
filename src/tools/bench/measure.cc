#include "tools/bench/measure.h"

#include <algorithm>

#include "tools/clock.h"
#include "tools/driver.h"
#include "tools/stats.h"

namespace mi::tools {
namespace {

struct Case {
  std::string metric;
  int64_t n, streams, prompt, generate;
};

std::vector<Case> list(const BenchCases& c) {
  std::vector<Case> all;
  for (int64_t n : c.prefill) all.push_back({"prefill", n, 1, n, 1});
  for (int64_t n : c.decode) all.push_back({"decode", n, 1, kBenchPrompt, n});
  for (int64_t n : c.batch) all.push_back({"batch", n, n, kBenchPrompt, kBenchBatchTokens});
  return all;
}

BenchRound run(Driver& d, const Case& c, uint64_t seed) {
  d.start(c.streams, c.prompt, c.generate, seed);
  const auto start = Clock::now();
  d.prefill();
  BenchRound r;
  r.ttft_s = seconds_since(start);
  if (c.metric == "prefill") {
    r.tok_s = double(c.prompt) / r.ttft_s;
    return r;
  }
  d.decode(c.generate - 1);
  const double total = seconds_since(start);
  r.tok_s = double(c.streams * (c.generate - 1)) / std::max(total - r.ttft_s, 1e-9);
  r.total_tok_s = double(c.streams * c.generate) / total;
  return r;
}

}  // namespace

std::vector<double> BenchRow::values(double BenchRound::*field) const {
  std::vector<double> v;
  for (const BenchRound& r : rounds) v.push_back(r.*field);
  return v;
}
double BenchRow::middle(double BenchRound::*field) const { return median(values(field)); }

int64_t bench_kv_tokens(const BenchCases& c) {
  int64_t pages = 1;
  for (const Case& k : list(c)) pages = std::max(pages, Driver::pages_needed(k.streams, k.prompt + k.generate));
  return pages * artifact::kKvPageTokens;
}

Status check_cases(const BenchCases& c, int64_t positions) {
  if (list(c).empty())
    return fail(ErrorCode::kUsage, "nothing to measure: --prefill, --decode and --batch are all empty");
  for (const Case& k : list(c)) {
    if (k.n < 1 || (k.metric == "decode" && k.n < 2))
      return fail(ErrorCode::kUsage, "--{} {}: too small to measure", k.metric, k.n);
    const int64_t length = k.prompt + k.generate;
    if (positions > 0 && length > positions)
      return fail(ErrorCode::kUsage, "--{} {}: sequences of {} tokens, the model has {} positions", k.metric, k.n,
                  length, positions);
  }
  return {};
}

std::vector<BenchRow> measure(exec::Engine& engine, const BenchCases& c, int rounds) {
  Driver d(engine);
  const std::vector<Case> cases = list(c);
  std::vector<BenchRow> rows;
  uint64_t seed = 1;
  for (const Case& k : cases) {
    run(d, {k.metric, k.n, k.streams, k.prompt, std::min<int64_t>(k.generate, 4)}, seed++);  // warm-up
    rows.push_back({k.metric, k.n, {}});
  }
  for (int r = 0; r < rounds; ++r)
    for (size_t i = 0; i < cases.size(); ++i) rows[i].rounds.push_back(run(d, cases[i], seed++));
  return rows;
}

}  // namespace mi::tools
