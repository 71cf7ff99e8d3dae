#pragma once
// Decides what the next step computes. Pure logic: no threads, no clock, no model; tests drive it directly.
//
// Sequences are served in order: by priority, smaller first, and equal ones first come, first served. A step is one
// token of every running sequence that decodes (with drafts: several), then chunks of prompts under a token budget:
// first of sequences already running, then of waiting ones. A waiting sequence is admitted when the batch has a place
// and the cache has pages for all its tokens (at least for a floor) and, beyond them, for each running sequence a step
// to grow into: that keeps preemptions rare. Whole pages that an earlier sequence left with the same tokens are taken
// over. When a decode finds no page, the last running sequence gives up its pages and waits again with its tokens, to
// be recomputed; so it does when one of a smaller priority number waits and finds no place. The first sequence is never
// preempted, and alone it always fits (check_request), so it ends.
//
// With a store below the cache, an admitted sequence first waits for the pages that the store has of its tokens; others
// run meanwhile. It computes what does not come: nothing but time depends on the store.

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/kv/cache.h"

namespace mi::runtime {

// What the scheduler knows of a request. Owned by the caller, who may append to `tokens` between steps.
struct Sequence {
  int64_t prompt_len = 0;
  std::vector<int32_t> tokens;      // prompt, then output
  bool score_prompt = false;        // logits of all prompt rows, not only of the last: takes over no pages
  int64_t priority = 0;             // smaller ones go first
  int64_t most_tokens = INT64_MAX;  // it ends with so many at the latest
  std::string salt;                 // pages are shared only among sequences with the same
  std::vector<int32_t> draft;       // guesses of the tokens behind `tokens`; only looked at while decoding

  // Set by the scheduler.
  uint64_t arrival = 0;  // order of add(); kept through preemptions
  bool running = false;
  int64_t computed = 0;  // tokens in the KV cache
  int64_t reused = -1;   // of these, at the first admission, taken over from earlier sequences; -1: never admitted
  kv::PageTable pages;   // covers at least `computed`
  std::vector<kv::RecordId> below;  // pages behind those that the cache had at the admission, to come from the store
  size_t below_asked = 0, below_got = 0;  // the first so many of them
  bool first_time = false;                // it was not preempted before: what comes counts as reused

  int64_t pending() const { return int64_t(tokens.size()) - computed; }
  bool loading() const { return below_got < below.size(); }
  bool decoding() const { return running && pending() == 1 && int64_t(tokens.size()) > prompt_len; }
};

struct SchedulerOptions {
  int64_t max_batch_size = 32;
  int64_t max_tokens_per_step = 512;            // rows of a step, decodes included; at least max_batch_size
  int64_t prefill_tokens = 512;                 // prompt rows of a step without decodes
  int64_t prefill_tokens_beside_decodes = 128;  // and with some
  bool reuse_prefixes = true;
  int64_t floor_tokens = 1;                 // room asked for when a sequence is admitted, at least
  int64_t growth_tokens = kv::kPageTokens;  // room left free for each running sequence at an admission
  std::function<bool()> refuse_pages;       // tests: asked at each request for pages; true: there are none this time
};

// One sequence's part of a step: tokens [seq->computed, seq->computed + tokens), and behind them the first `drafts`
// tokens of its draft.
struct Work {
  Sequence* seq = nullptr;
  int64_t tokens = 0;
  int64_t drafts = 0;       // only beside tokens == 1; the logits of all their rows are needed
  int64_t logits_from = 0;  // first row of the part whose logits are needed; == tokens: none
  bool samples = false;     // the last token's logits choose the next token
};

struct StepPlan {
  std::vector<Work> work;  // decodes first, each group in order
  int64_t decodes = 0;
  int64_t preempted = 0;
  bool refused = false;  // by SchedulerOptions::refuse_pages: the work may be empty although something waits
};

class Scheduler {
 public:
  // freed, below: as for kv::Cache.
  Scheduler(const SchedulerOptions& options, int64_t kv_pages, std::function<void(std::span<const int32_t>)> freed = {},
            kv::Below below = {});

  // seq must stay alive until remove(). It has at least one token and fits the pool alone.
  void add(Sequence* seq);
  // The next step's work; empty only when nothing is left, or all that could run is loading(). Pages are taken,
  // `computed` is not moved yet. beside_decodes, alone: prompt tokens instead of the options, at least 1; for callers that
  // know how long a step may take.
  StepPlan plan(int64_t beside_decodes, int64_t alone);
  StepPlan plan() { return plan(options_.prefill_tokens_beside_decodes, options_.prefill_tokens); }
  // The step ran: `computed` moves behind the tokens. Every sequence of the plan must still be there.
  void advance(const StepPlan& plan);
  // The first draft turned out right and is the last token now: it is computed as well.
  void accept_draft(Sequence* seq);
  // Ended or cancelled, running or waiting; its pages are free at once.
  void remove(Sequence* seq);

  // Takes what the store has read, and asks it for more; before each plan(). Returns how many pages came, lost ones
  // too.
  int64_t load();
  bool loading() const;  // a running sequence waits for the store
  // The store keeps them waiting: they compute what has not come, and it is not asked again until it moves.
  void stop_loading();
  // As of kv::Cache, between two steps.
  int64_t write_behind(int64_t most) { return cache_.write_behind(most); }

  int64_t running() const { return int64_t(running_.size()); }
  int64_t waiting() const { return int64_t(waiting_.size()); }
  std::map<int64_t, int64_t> waiting_by_priority() const;
  const kv::Cache& cache() const { return cache_; }
  // MI_CHECKs what must always hold: pages conserved, batch within its limit, sequences in order.
  void check_invariants() const;

 private:
  void preempt_last();
  bool cover(Sequence* seq, int64_t tokens);
  void stop_loading(Sequence* seq);
  void take_prefill(Sequence* seq, int64_t* budget, StepPlan* plan) const;
  bool admit_next();
  bool fits_instead(Sequence* seq);
  int64_t pages_to_grow(const Sequence& s) const;
  int64_t room_for(const Sequence& s) const;
  void admit_urgent(StepPlan* plan);

  SchedulerOptions options_;
  kv::Cache cache_;
  uint64_t next_arrival_ = 0;
  std::vector<Sequence*> running_;                   // in order
  std::deque<Sequence*> waiting_;                    // in order
  std::unordered_map<uint64_t, Sequence*> tickets_;  // of the store's reads under way
  bool store_hangs_ = false;
  bool refused_ = false;  // in the plan that is made
};

}  // namespace mi::runtime
