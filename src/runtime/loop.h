#pragma once
// The thread that runs the steps, and the only way in and out of it. Everything public is thread-safe and answers at
// once: nothing here waits for a step (drain, which is meant to wait, aside).
//
//   EngineLoop loop(std::move(stepper), tokenizer, {});
//   Admission a = loop.submit(std::move(request), [queue](Event&& e) { queue->push(std::move(e)); });
//   if (!a.ok()) ...a.message...
//   loop.cancel(a.id);                      // the sink still gets its FinishEvent (kCancelled) at the next step's end

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "runtime/kv/store.h"
#include "runtime/request.h"
#include "runtime/stats.h"
#include "runtime/stepper.h"
#include "text/tokenizer.h"

namespace mi::runtime {

struct LoopOptions {
  int64_t max_batch_size = 32;   // sequences in a step
  int64_t max_seq_len = 4096;    // prompt and output together; at most the model's own limit
  int64_t max_waiting = 0;       // beyond a full batch; more are refused (generate() needs 0). 0: no limit
  double max_queue_seconds = 0;  // a request that would wait longer for its first step is refused. 0: no limit
  int64_t prefill_tokens = 512;  // most prompt tokens in a step with no running decode
  int64_t prefill_tokens_beside_decodes = 512;  // the same with running decodes
  double step_seconds = 0.1;   // longest a step with running decodes should take: fewer prompt tokens (Pace). 0: off
  bool step_grows = false;     // it may take longer where reading the weights does (Pace)
  double alone_seconds = 1;    // the same with none, but for 512 prompt tokens. 0: off
  bool reuse_prefixes = true;  // whole KV pages stay, while there is room, for requests that begin with the same tokens
  int64_t kv_floor_tokens = 1, kv_growth_tokens = 64;  // SchedulerOptions::floor_tokens, growth_tokens
  std::shared_ptr<kv::Store> kv_store;  // pages of this engine on disk; only with reuse_prefixes. null: none
  std::function<bool()> refuse_pages;   // tests: SchedulerOptions::refuse_pages
  int64_t draft_tokens = 0;             // most tokens guessed ahead of a decode (repeat_draft); no answer depends on it
  std::vector<int64_t> eos_ids;         // the model's end tokens
};

class EngineLoop {
 public:
  // tokenizer may be null: then events carry no text, and stop strings are refused. Starts the thread.
  EngineLoop(std::unique_ptr<Stepper> stepper, std::shared_ptr<const text::Tokenizer> tokenizer, LoopOptions options);
  // Cancels what is left (each sink gets its FinishEvent) and joins.
  ~EngineLoop();
  EngineLoop(const EngineLoop&) = delete;

  // Refusals come back here and cause no event. An accepted request causes exactly one FinishEvent.
  Admission submit(Request r, Sink sink);
  // Unknown and finished ids are fine.
  void cancel(uint64_t id);

  // No new requests from now on (kDraining); the accepted ones go on.
  void stop_accepting();
  // stop_accepting(), then waits until all are finished, or cancels the rest after `limit`. True if none was cancelled.
  // What is left of the time goes to pages that are not on disk yet.
  bool drain(std::chrono::milliseconds limit);

  Stats stats() const;
  const Limits& limits() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mi::runtime
