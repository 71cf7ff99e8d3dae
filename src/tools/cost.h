#pragma once
// What a step's instructions must read and compute, from the engine's program and the shape of the step alone. Weights
// and keys are counted once per step, however often a kernel reads them: this is what the machine cannot avoid, to be
// compared with what it took.
//
// Operations: a multiply and an add are two, an exponential or a comparison is one. Products with weights count the
// true sizes without padding. Attention counts the keys that a row sees; selected blocks count as if all of them were
// full, and their keys as if the rows of a step shared none (at most the context).

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "artifact/types.h"
#include "exec/batch.h"
#include "kernels/attention/kv_cache.h"

namespace mi::tools {

struct StepShape {
  struct Part {
    int64_t start = 0, tokens = 0, logits = 0;  // of one sequence: tokens in its cache before, rows, rows with logits
  };
  std::vector<Part> parts;
  int64_t tokens() const;
  int64_t logits() const;
};
StepShape shape_of(const exec::Batch& b);

struct Cost {
  double weight_bytes = 0, kv_bytes = 0;  // to be read
  double int8_ops = 0, float_ops = 0, bf16_ops = 0;  // bf16: pairs of bfloat16, attention over such a cache
  double bytes() const { return weight_bytes + kv_bytes; }
  double ops() const { return int8_ops + float_ops + bf16_ops; }
  Cost& operator+=(const Cost& o);
};

// experts: how many different experts the step's tokens chose, for instructions that read expert weights.
Cost instr_cost(const artifact::Manifest& m, const artifact::Instr& i, const StepShape& s, double experts,
                kernels::KvKind kv);

// E (1 - (1 - k/E)^tokens): different experts that tokens choose when all experts are equally likely.
double expected_experts(int64_t experts, int64_t k, double tokens);

// What an instruction with expert weights chooses from, and how many a token takes; {0, 0}: it has no expert weights.
struct ExpertChoice {
  int64_t experts = 0, k = 0;
};
ExpertChoice expert_choice(const artifact::Manifest& m, const artifact::Instr& i);

// ---- a model's bounds, as benchmarks define them: products with weights, no attention ----
// Operations of one token in products with weights; with_head: also the one that gives its logits.
double token_ops(const artifact::Manifest& m, bool with_head);
// Weight bytes that a step of `streams` sequences with one token each must read when experts are chosen evenly.
double step_weight_bytes(const artifact::Manifest& m, double streams);
// True when most of those operations (the head's left out) are int8.
bool mostly_int8(const artifact::Manifest& m);

// "f32", "bf16" or "int8", as the engine's options name it.
kernels::KvKind kv_kind_of(const std::string& name);

}  // namespace mi::tools
