#pragma once
// Where an engine's time goes: each instruction of the program timed over whole scenarios, beside what it had to read
// and compute and what the machine can do. A scenario runs several rounds and reports the fastest, the one that the
// rest of the machine disturbed least; the experts that its tokens chose are counted in a run of their own (the same
// ids choose the same experts), so that counting costs the timed rounds nothing.

#include <optional>
#include <string>
#include <vector>

#include "base/file.h"
#include "exec/engine.h"
#include "tools/cost.h"
#include "tools/machine.h"
#include "tools/profile/experts.h"
#include "tools/profile/memory.h"

namespace mi::tools {

inline constexpr int64_t kProfilePrompt = 128;  // before decoding

struct ProfileOptions {
  std::vector<int64_t> prefill{512};  // prompt lengths
  int64_t decode = 64;                // steps
  std::vector<int64_t> batch{1, 8};   // sequences that decode together
  int rounds = 3;
};

// An instruction of the program, for people.
struct InstrInfo {
  std::string op, name, kernel, why;
  int32_t layer = -1;
};

struct InstrStat {
  double seconds = 0;  // all calls
  int64_t calls = 0, pool_jobs = 0;
  Cost cost;  // all calls
};

// One step from the middle of the scenario, timed alone.
struct TracedStep {
  int64_t number = 0;  // of the scenario's steps, from 0
  double seconds = 0;
  struct Span {
    size_t instr = 0;
    double begin = 0, seconds = 0;
    Cost cost;
  };
  std::vector<Span> spans;
};

struct Scenario {
  std::string name;                                      // "prefill 512", "decode, batch 8"
  int64_t prompt = 0, batch = 0, steps = 0, tokens = 0;  // tokens: rows of all steps
  double seconds = 0;                                    // inside the engine, all steps of the fastest round
  double between_seconds = 0;                            // between its steps: choosing tokens, making batches
  std::vector<double> round_seconds;                     // of each round, both together
  std::vector<InstrStat> instrs;                         // by place in the program
  std::vector<ExpertLoad> experts;                       // per layer with experts
  TracedStep trace;
  double outside_seconds() const;  // inside the engine, but in no instruction
};

struct Profile {
  std::string version, engine, precision, kv_type;
  Machine machine;
  std::vector<InstrInfo> program;
  std::vector<Scenario> scenarios;
  std::optional<MemoryReport> memory;
  std::vector<std::string> notes;  // what a reader of the shares has to know, in sentences
};

int64_t profile_kv_tokens(const ProfileOptions& o);
// Errors: kUsage: no scenario at all, one too small to measure, or longer than the model's positions; those of the
// engine's description, which is all that is read.
Status check_profile(const Path& engine, const ProfileOptions& o);
// Precondition: check_profile(), and KV pages for profile_kv_tokens().
Profile run_profile(exec::Engine& engine, const Machine& machine, const ProfileOptions& o);

// ---- sums over instructions, the longest first (layers: in order) ----
enum class GroupBy { kOp, kName, kLayer };
struct Group {
  std::string name;    // "linear"; "linear x_attn"; "layer 3"
  std::string kernel;  // of its instructions, joined where they differ
  InstrStat sum;
  LimitShare limit;
  double share = 0;  // of the time inside the engine
};
std::vector<Group> group(const Profile& p, const Scenario& s, GroupBy by);

// Each kernel with the ops that it runs and why it was chosen.
struct KernelUse {
  std::string kernel, ops, why;
};
std::vector<KernelUse> kernels_used(const Profile& p);

}  // namespace mi::tools
