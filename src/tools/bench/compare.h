#pragma once
// The regression gate: is this run slower than an earlier one, or than another program measured beside it? A figure
// regressed only when the whole confidence interval of the ratio lies below 1 - threshold; noise widens the interval
// and so never fails a run by itself.

#include <string>
#include <vector>

#include "tools/bench/record.h"
#include "tools/stats.h"

namespace mi::tools {

// Fewer rounds give no interval to speak of: the range of 5 covers the true median in 94 of 100 cases, that of 3 in 75.
inline constexpr int kFewestRounds = 5;

struct CompareOptions {
  double threshold = 0.05;
  double confidence = 0.95;
  bool other_engine = false;  // compare although the engine is another one
  uint64_t seed = 1;          // of the bootstrap
};

struct CompareRow {
  std::string figure;        // "prefill 512 tok/s"
  double now = 0, then = 0;  // medians
  Interval ratio;            // above 1: better now
  bool regressed = false;
};
struct Comparison {
  std::string with;  // what `then` is, for people
  std::vector<CompareRow> rows;
  double threshold = 0;
  bool regressed() const;
};

// Whether figures measured as `now` says may be compared with `then`; rows are not looked at. `with` names `then`.
// Errors: kEnvironment for another machine, kUsage for another engine, other settings or too few rounds there.
Status check_comparable(const BenchRecord& now, const BenchRecord& then, const std::string& with,
                        const CompareOptions& o);

// Each figure's rounds are drawn independently; memory peaks (one number a run) are judged by the threshold alone.
// Errors: those of check_comparable().
Result<Comparison> compare_records(const BenchRecord& now, const BenchRecord& then, const std::string& with,
                                   const CompareOptions& o);

// Two programs measured in turns: round i of one beside round i of the other, so slow phases of the machine cancel in
// each round's ratio. Precondition: the same cases and as many rounds.
Comparison compare_rounds(const std::vector<BenchRow>& now, const std::vector<BenchRow>& then, const std::string& with,
                          const CompareOptions& o);

std::string comparison_text(const Comparison& c);
Json comparison_json(const Comparison& c);  // {"compare": {...}}, one line of JSON output

}  // namespace mi::tools
