#pragma once
// What a loaded engine takes, known before it is loaded: everything counted as if it were used to the full.

#include <cstdint>

#include "exec/engine.h"

namespace mi::exec {

struct MemoryPlan {
  int64_t weights = 0;       // read or mapped; without experts that are streamed
  int64_t expert_cache = 0;  // where they are
  int64_t kv = 0, activations = 0;
  int64_t workspace = 0;     // rope tables, the threads' scratch, what is kept for the step
  int64_t total() const { return weights + expert_cache + kv + activations + workspace; }
};

// One page of all layers, as stored. kv_type: "f32", "bf16", "int8"; "": the engine's default.
int64_t kv_page_bytes(const artifact::Manifest& m, const std::string& kv_type);
// Weights as they are divided when experts are streamed; the embedding, which is mapped, is in neither.
struct WeightDivision {
  int64_t kept = 0, experts = 0;
};
WeightDivision divide_weights(const artifact::Manifest& m);

MemoryPlan plan_memory(const artifact::Manifest& m, const LoadOptions& o, int threads);

}  // namespace mi::exec
