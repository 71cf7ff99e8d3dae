#pragma once
// Static activation scales: one number per quantize node, from what calibration saw. Which nodes get one is the
// recipe's choice (activation_scheme, activations); the others scale every row at run time.

#include <map>
#include <set>
#include <string>

#include "ir/graph.h"
#include "quant/capture.h"
#include "quant/config.h"
#include "quant/smooth.h"

namespace mi::quant {

// The values of a layer that get a static scale.
class StaticScales {
 public:
  // g: the graph with its quantize nodes. Errors: a pattern of `activations` that means no matrix.
  static Result<StaticScales> choose(const QuantConfig& c, const ir::Graph& g);

  bool any() const { return !values_.empty(); }
  bool has(int32_t layer, const std::string& value) const { return values_.count({layer, value}) != 0; }

  // Declares "act.VALUE.scale" for them; blocks are split where layers differ.
  void declare(ir::Graph& g) const;
  // The numbers of one layer, by full name.
  std::map<std::string, float> measure(const LayerCapture& seen, const LayerSmoothing& smoothing,
                                       const QuantConfig& c) const;

 private:
  std::set<std::pair<int32_t, std::string>> values_;
};

// The largest magnitude that 127 stands for, of |x| in any order.
float observed_limit(std::vector<float> magnitudes, const QuantConfig& c);

}  // namespace mi::quant
