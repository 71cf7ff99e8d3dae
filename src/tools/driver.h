#pragma once
// Drives an engine the way the step loop does, without a scheduler and with the best token as the only sampling:
// sequences of random ids, processed to their first token, then one token each per step.

#include <cstdint>
#include <functional>
#include <vector>

#include "exec/engine.h"

namespace mi::tools {

class Driver {
 public:
  explicit Driver(exec::Engine& engine);

  // Called with each step right before it runs; may be empty.
  std::function<void(const exec::Batch&)> before_step;

  // KV pages that sequences of this shape take.
  static int64_t pages_needed(int64_t streams, int64_t tokens_each);

  // `streams` sequences of `prompt` ids, room for `generate` tokens each. The same seed gives the same ids.
  // Precondition: their pages fit the engine's pool.
  void start(int64_t streams, int64_t prompt, int64_t generate, uint64_t seed);
  // One step of prompts, filled up to the engine's capacity. False: every sequence has its first token, nothing was
  // run.
  bool prefill_step();
  void prefill() {
    while (prefill_step()) {
    }
  }
  // One token for each sequence. Precondition: prefill is done and there is room.
  void decode_step();
  void decode(int64_t steps) {
    for (int64_t i = 0; i < steps; ++i) decode_step();
  }

 private:
  struct Sequence {
    std::vector<int32_t> ids, pages;
    int64_t done = 0;  // tokens in the cache
    int32_t next = 0;  // the token to run next, once the prompt is done
  };
  std::span<const float> run(const exec::Batch& b);
  int32_t best(std::span<const float> logits, size_t row) const;

  exec::Engine& engine_;
  int64_t vocab_;
  std::vector<Sequence> sequences_;
  size_t prefilled_ = 0;  // sequences that have their first token
};

}  // namespace mi::tools
