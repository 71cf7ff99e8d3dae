#pragma once
// Stored activation scales: one number per quantize node, from what calibration saw. Which nodes get one is the recipe's
// choice: a static one (activation_scheme, activations), or one at which the scales of rows saturate (saturation); the
// others scale every row at run time.

#include <map>
#include <string>

#include "ir/graph.h"
#include "quant/capture.h"
#include "quant/config.h"
#include "quant/smooth.h"

namespace mi::quant {

// Steps through values of `cols` channels, so that about four million are looked at, of all channels: the step is
// coprime to their number.
size_t sampling_step(size_t values, int64_t cols);

// The values of a layer that get a stored scale.
class StoredScales {
 public:
  // g: the graph with its quantize nodes. Errors: a pattern of `activations` or `saturation` that means no matrix.
  static Result<StoredScales> choose(const QuantConfig& c, const ir::Graph& g);

  bool any() const { return !values_.empty(); }
  bool is_static(int32_t layer, const std::string& value) const { return is(layer, value, Kind::kStatic); }
  bool saturates(int32_t layer, const std::string& value) const { return is(layer, value, Kind::kSaturates); }

  // Declares "act.VALUE.scale" for them; blocks are split where layers differ.
  void declare(ir::Graph& g) const;
  // The numbers of one layer, by full name. Of those that saturate, by the percentile of `saturation`.
  std::map<std::string, float> measure(const LayerCapture& seen, const LayerSmoothing& smoothing,
                                       const QuantConfig& c) const;

 private:
  enum class Kind : char { kStatic, kSaturates };
  bool is(int32_t layer, const std::string& value, Kind k) const {
    const auto it = values_.find({layer, value});
    return it != values_.end() && it->second == k;
  }
  std::map<std::pair<int32_t, std::string>, Kind> values_;
};

// The largest magnitude that 127 stands for, of |x| in any order.
float observed_limit(std::vector<float> magnitudes, Observer observer, double percentile);

}  // namespace mi::quant
