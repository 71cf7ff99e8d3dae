#pragma once
// Numbers about a running loop as plain data: what /metrics prints.

#include <array>
#include <cstdint>
#include <span>

#include "exec/stream_stats.h"
#include "runtime/kv/store.h"
#include "runtime/request.h"

namespace mi::runtime {

// Cumulative histogram over fixed bounds, in seconds. counts[i]: values <= kBounds[i] and > the bound before; the last
// count is for everything above.
struct Histogram {
  static constexpr std::array<double, 23> kBounds = {0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02,
                                                     0.03,   0.05,    0.075,  0.1,   0.15,   0.25,  0.5,  0.75,
                                                     1.0,    2.5,     5.0,    10.0,  30.0,   60.0,  300.0};
  std::array<uint64_t, kBounds.size() + 1> counts{};
  uint64_t count = 0;
  double sum = 0;
  void add(double seconds);
};

struct Stats {
  // Gauges.
  int64_t running = 0;  // admitted to the batch
  int64_t waiting = 0;  // accepted, not in the batch (preempted ones too)
  int64_t kv_pages_total = 0, kv_pages_used = 0;
  int64_t kv_pages_reusable = 0;  // not used, and holding what a request may begin with
  bool draining = false;
  double seconds_per_start = 0;       // between two starts of sequences while others wait, lately; 0: not known
  double expected_wait = 0;           // seconds until the first step of a request that comes now; 0 also if not known
  double step_limit = 0;              // seconds that a step with running decodes should take at most; 0: no limit
  double seconds_since_progress = 0;  // since a step ended or the loop was last idle: large = stuck
  // Counters since the start.
  uint64_t steps = 0;
  uint64_t prompt_tokens = 0;    // of requests that were started, counted once
  uint64_t reused_tokens = 0;    // of prompt_tokens, those found in the KV cache, or on disk, at the first admission
  uint64_t computed_tokens = 0;  // rows run through the model, recomputation and drafts included
  uint64_t draft_tokens = 0, accepted_draft_tokens = 0;
  uint64_t kv_pages_given_up = 0;  // reusable pages that made room for others
  kv::StoreStats kv_disk;          // zeros without one
  exec::StreamStats experts;       // read from disk; zeros where all are in memory
  uint64_t generated_tokens = 0;
  uint64_t preemptions = 0;
  uint64_t accepted = 0;
  std::array<uint64_t, kFinishReasons> finished{};  // index: FinishReason; the sum equals accepted when all are done
  std::array<uint64_t, 5> refused{};                // index: Refusal
  double step_seconds = 0;                          // time inside the model
  double host_seconds = 0;                          // time between: planning, sampling, text, delivery
  // Latencies.
  Histogram queue, ttft, inter_token, e2e;
  // Of steps that only continue answers: the time inside the model, and the time from the end of the step before to it.
  Histogram decode_step, step_gap;
};

}  // namespace mi::runtime
