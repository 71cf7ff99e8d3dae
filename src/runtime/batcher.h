#pragma once
// The runtime without its thread: requests in, one step at a time, events out. Joins scheduler, model, sampler and
// text. Not thread-safe, no clock of its own: EngineLoop runs it on a thread, tests run it by hand.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "exec/batch.h"
#include "runtime/draft.h"
#include "runtime/loop.h"
#include "runtime/output_text.h"
#include "runtime/pace.h"
#include "runtime/queue_rate.h"
#include "runtime/sampler.h"
#include "runtime/scheduler.h"

namespace mi::runtime {

class Batcher {
 public:
  using Clock = std::function<double()>;  // seconds, never backwards
  // seed: what requests without a seed of their own draw from. The stepper is borrowed.
  Batcher(Stepper& stepper, std::shared_ptr<const text::Tokenizer> tokenizer, LoopOptions options, uint64_t seed,
          Clock clock);
  ~Batcher();
  Batcher(const Batcher&) = delete;

  const Limits& limits() const { return limits_; }
  // Precondition: check_request() accepts r. arrival: the clock's time when it came in.
  void add(uint64_t id, Request r, Sink sink, double arrival);
  void cancel(uint64_t id);
  void cancel_all();
  // Runs one step; false if there is nothing to do. Where only the disk has, waits for it a moment.
  bool step();
  // Hands out the FinishEvents of add(), cancel() and step() so far. Apart from them so that the owner can publish the
  // new numbers first: who has its last event finds itself gone from the gauges. True if there were any.
  bool deliver_ended();
  bool idle() const { return live_.empty(); }
  bool unsaved() const { return scheduler_.cache().unsaved(); }  // pages that belong on disk are not there yet

  // The fields that this class knows: all but draining, refused, accepted and seconds_since_progress.
  const Stats& stats() const { return stats_; }
  // How many wait, by priority.
  std::map<int64_t, int64_t> queue() const { return scheduler_.waiting_by_priority(); }
  void check_invariants() const { scheduler_.check_invariants(); }

 private:
  struct Live;
  struct RowJob;
  void collect_rows(const StepPlan& plan, std::span<const float> logits, std::vector<RowJob>* jobs);
  void pool_rows(const StepPlan& plan, std::span<const float> hidden);
  void run_row(const RowJob& job) const;
  void deliver(Live& live);
  bool take_token(Live& live, FinishEvent* end);
  void guess(Live& live) const;
  void finish(Live& live, FinishEvent e);
  void end_early(uint64_t id, FinishReason reason);
  void end_overdue(double now);
  void load(double now);
  void refresh_gauges();

  Stepper& stepper_;
  std::shared_ptr<const text::Tokenizer> tokenizer_;
  LoopOptions options_;
  uint64_t seed_;
  Clock clock_;
  Limits limits_;
  Scheduler scheduler_;
  Pace pace_;
  QueueRate queue_rate_;
  double model_ended_ = -1;  // when the step before left the model, if answers went on after it
  double loaded_at_ = 0;  // when the disk gave something, or nothing was wanted of it
  std::unordered_map<uint64_t, std::unique_ptr<Live>> live_;
  std::vector<std::pair<std::unique_ptr<Live>, FinishEvent>> ended_;
  Stats stats_;
};

// Which settings the options come to for this stepper: nothing asks for more than the model can run.
LoopOptions fit_options(LoopOptions options, const Stepper& stepper);

}  // namespace mi::runtime
