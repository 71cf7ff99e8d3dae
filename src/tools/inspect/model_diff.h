#pragma once
// Two models side by side: facts, ops, and every weight: which are missing, stored otherwise, or hold other numbers.

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/result.h"
#include "tools/inspect/card.h"

namespace mi::tools {

struct ModelDiff {
  struct Line {
    std::string what, a, b;  // a or b empty: not there
  };
  std::vector<Line> facts;    // of the cards, where they differ
  std::vector<Line> ops;      // counts by op, summed over layers, where they differ
  std::vector<Line> weights;  // declared differently
  int64_t same_weights = 0;   // declared equally
  // Weights that both hold and store in the same way, compared byte for byte; none of a checkpoint, or of a MIR beside an
  // engine: those store them in different ways.
  bool bytes_compared = false;
  int64_t equal_bytes = 0;
  std::vector<std::string> other_bytes;  // names
  bool same() const { return facts.empty() && ops.empty() && weights.empty() && other_bytes.empty(); }
};

ModelDiff diff_models(const Subject& a, const Subject& b, int64_t available);
std::string model_diff_text(const ModelDiff& c);
Json model_diff_json(const ModelDiff& c);

}  // namespace mi::tools
