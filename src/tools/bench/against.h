#pragma once
// Rounds of this and another metainfer program in turns, each round a process of its own, so that both are measured in
// the same phases of the machine and after the same start.

#include <functional>
#include <string>
#include <vector>

#include "base/file.h"
#include "tools/bench/measure.h"
#include "tools/session.h"

namespace mi::tools {

struct AgainstOptions {
  Path ours, theirs;      // programs
  SessionOptions session;  // of both, but for the engine of theirs
  Path their_engine;
  BenchCases cases;
  int rounds = 0;
};

// What a program is told of the session: everything but what is as it is by default, which older programs may not know.
std::vector<std::string> session_flags(const SessionOptions& o);

// What one process printed.
struct ChildRun {
  std::string version;
  double load_s = 0;
  std::vector<BenchRow> rows;         // one round each
  std::optional<int64_t> peak_bytes;  // none: it does not say
};
// The JSON lines of metainfer bench --json. Error (kBadInput): a case is missing; `what` names the program.
Result<ChildRun> parse_bench_output(std::string_view text, const BenchCases& cases, const std::string& what);

struct AgainstResult {
  std::vector<BenchRow> ours, theirs;  // rounds in the order measured
  std::string our_version, their_version;
  double load_s = 0;                  // ours, the median
  std::optional<int64_t> peak_bytes;  // ours, the largest
};
// after_round, may be empty: rounds done. Errors (kEnvironment): a program cannot be started, or fails.
Result<AgainstResult> run_against(const AgainstOptions& o, const std::function<void(int)>& after_round);

}  // namespace mi::tools
