#pragma once
// Where a step's time goes: the engine writes into a Timing while one is set (Engine::set_timing).

#include <chrono>
#include <cstdint>
#include <vector>

namespace mi::exec {

// Sums over the steps since the Timing was set; an instruction that a step left out (no logits wanted) adds nothing.
struct InstrTime {
  int64_t ns = 0;
  int64_t calls = 0;
  int64_t pool_jobs = 0;  // times the pool's threads were called together
  int64_t start_ns = 0;   // of the last call, since its step began
};

struct Timing {
  std::vector<InstrTime> instrs;  // by place in the program; set_timing() gives it this size, all zero
  int64_t steps = 0;
  int64_t ns = 0;  // whole steps: what is not an instruction's is rows, taps and logits
};

// The clock of one step.
class StepClock {
 public:
  using Clock = std::chrono::steady_clock;
  explicit StepClock(Timing* t) : timing_(t), begin_(Clock::now()) {}
  ~StepClock() {
    ++timing_->steps;
    timing_->ns += now();
  }
  StepClock(const StepClock&) = delete;
  // run() is the instruction; jobs() counts the pool's jobs so far.
  template <typename Run, typename Jobs>
  void time(size_t index, Run run, Jobs jobs) {
    InstrTime& t = timing_->instrs[index];
    const int64_t jobs_before = jobs();
    t.start_ns = now();
    run();
    t.ns += now() - t.start_ns;
    ++t.calls;
    t.pool_jobs += jobs() - jobs_before;
  }

 private:
  int64_t now() const { return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin_).count(); }
  Timing* timing_;
  Clock::time_point begin_;
};

}  // namespace mi::exec
