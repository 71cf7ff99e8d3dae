#pragma once
// One sequence through an engine with everything that can be compared kept: residual stream, routing, logits.

#include <map>
#include <span>
#include <vector>

#include "exec/engine.h"

namespace mi::tools {

struct Trace {
  std::map<int32_t, std::vector<float>> residual;  // after layer (-1: what enters layer 0), [T, H]
  struct Routing {
    int64_t k = 0;
    std::vector<int32_t> ids;
    std::vector<float> weights;
  };                                   // [T, k], largest weight first, ties by id
  std::map<int32_t, Routing> routing;  // by layer
  std::vector<float> logits;           // [T, V]
};

// Runs ids in steps of the engine's capacity from an empty context, on pages 0... Precondition: they fit.
// given: residual streams by layer, as in Trace::residual, of the same ids; every layer is then fed what they hold and
// not what the layer before it made, so that each shows its own errors alone.
using Residual = std::map<int32_t, std::vector<float>>;
Trace trace(exec::Engine& engine, std::span<const int32_t> ids, const Residual* given = nullptr);

}  // namespace mi::tools
