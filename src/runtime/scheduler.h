#pragma once
// Decides what the next step computes. Pure logic: no threads, no clock, no model; tests drive it directly.
//
// A step is one token of every running sequence that decodes, then chunks of prompts under a token budget: first of
// sequences already running, then of waiting ones, first come first served. A waiting sequence is admitted when the
// batch has a place and the pool has pages for all its tokens and, beyond them, one for each running sequence to grow
// into. When a decode finds no page, the youngest running sequence gives up its pages and waits again with its tokens,
// to be recomputed. The oldest sequence is never preempted, and alone it always fits (check_request), so every one
// ends.

#include <cstdint>
#include <deque>
#include <vector>

#include "runtime/kv/page_table.h"

namespace mi::runtime {

// What the scheduler knows of a request. Owned by the caller, who may append to `tokens` between steps.
struct Sequence {
  int64_t prompt_len = 0;
  std::vector<int32_t> tokens;  // prompt, then output
  bool score_prompt = false;    // logits of all prompt rows, not only of the last

  // Set by the scheduler.
  uint64_t arrival = 0;  // order of add(); kept through preemptions
  bool running = false;
  int64_t computed = 0;  // tokens in the KV cache
  kv::PageTable pages;   // covers at least `computed`

  int64_t pending() const { return int64_t(tokens.size()) - computed; }
  bool decoding() const { return running && pending() == 1 && int64_t(tokens.size()) > prompt_len; }
};

struct SchedulerOptions {
  int64_t max_batch_size = 32;
  int64_t max_tokens_per_step = 512;            // rows of a step, decodes included; at least max_batch_size
  int64_t prefill_tokens = 512;                 // prompt rows of a step without decodes
  int64_t prefill_tokens_beside_decodes = 128;  // and with some
};

// One sequence's part of a step: tokens [seq->computed, seq->computed + tokens).
struct Work {
  Sequence* seq = nullptr;
  int64_t tokens = 0;
  int64_t logits_from = 0;  // first row of the part whose logits are needed; == tokens: none
  bool samples = false;     // the last row's logits choose the next token
};

struct StepPlan {
  std::vector<Work> work;  // decodes first, each group by age
  int64_t decodes = 0;
  int64_t preempted = 0;
};

class Scheduler {
 public:
  // freed: as for kv::PagePool.
  Scheduler(const SchedulerOptions& options, int64_t kv_pages, std::function<void(std::span<const int32_t>)> freed = {});

  // seq must stay alive until remove(). It has at least one token and fits the pool alone.
  void add(Sequence* seq);
  // The next step's work; empty only when nothing is left. Pages are taken, `computed` is not moved yet.
  StepPlan plan();
  // The step ran: `computed` moves. Every sequence of the plan must still be there.
  void advance(const StepPlan& plan);
  // Ended or cancelled, running or waiting; its pages are free at once.
  void remove(Sequence* seq);

  int64_t running() const { return int64_t(running_.size()); }
  int64_t waiting() const { return int64_t(waiting_.size()); }
  const kv::PagePool& pool() const { return pool_; }
  // MI_CHECKs what must always hold: pages conserved, batch within its limit, ages in order.
  void check_invariants() const;

 private:
  void preempt_youngest();
  void take_prefill(Sequence* seq, int64_t* budget, StepPlan* plan) const;
  bool admit_next();

  SchedulerOptions options_;
  kv::PagePool pool_;
  uint64_t next_arrival_ = 0;
  std::vector<Sequence*> running_;  // by arrival
  std::deque<Sequence*> waiting_;   // by arrival
};

}  // namespace mi::runtime
