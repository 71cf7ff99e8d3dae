#pragma once
// Runs calibration sequences through a float engine and remembers, per layer, what its matrices were fed.

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "exec/engine.h"
#include "ir/graph.h"
#include "quant/calibration_data.h"

namespace mi::quant {

using ValueKey = std::pair<int32_t, std::string>;  // layer, value name in the graph

struct Observations {
  std::map<ValueKey, std::vector<float>> max_abs;         // per channel of every value that a matrix reads
  std::map<int32_t, std::vector<int64_t>> expert_tokens;  // per MoE layer: pairs routed to each expert
};

// `engine` runs the plain graph of `g` (opt level 0), so that its values carry the graph's names.
Observations observe(exec::Engine& engine, const ir::Graph& g, const CalibrationSet& set);

}  // namespace mi::quant
