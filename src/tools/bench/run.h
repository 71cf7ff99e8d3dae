#pragma once
// One run of metainfer bench: the machine's limits, the engine's figures, memory.

#include <functional>
#include <string>
#include <vector>

#include "tools/bench/against.h"
#include "tools/bench/record.h"
#include "tools/bench/sweep.h"
#include "tools/session.h"

namespace mi::tools {

struct BenchOptions {
  SessionOptions session;  // its sizes are chosen by what is measured
  bool probe = true;
  BenchCases cases;
  int rounds = 3;
  // Asked once machine, engine and settings are known, before anything is measured; an error ends the run. May be
  // empty.
  std::function<Status(const BenchRecord&)> before_measuring;
};

struct BenchOutcome {
  BenchRecord record;
  std::vector<std::string> notes;  // what could not be had, in sentences
};

// In this process. The probe comes first and its memory is given back, so that the peak is the engine's.
Result<BenchOutcome> run_bench(const BenchOptions& o);

// The matrix instead of the cases.
struct SweepOutcome {
  Machine machine;
  double load_s = 0;
  std::vector<SweepCell> cells;
};
Result<SweepOutcome> run_bench_sweep(const BenchOptions& o);

// In turns with another program (against.h): the record is this program's.
struct AgainstOutcome {
  BenchOutcome bench;
  std::vector<BenchRow> theirs;
  std::string their_version;
};
Result<AgainstOutcome> run_bench_against(const BenchOptions& o, const Path& program, const Path& their_engine,
                                         const std::function<void(int)>& after_round);

}  // namespace mi::tools
