#pragma once
// SmoothQuant: moves the difficulty of outlier channels from activations into weights. For the output `a` of a norm,
//   s_j = max|a_j|^alpha / max_readers |W_j|^(1 - alpha)
// the norm's weight is divided by s and the columns of *every* reader of `a` are multiplied by s: q, k, v, index
// projections, router, all experts, shared expert and its gate. The function of the float model does not change.
// (Xiao et al., "SmoothQuant", 2022; the choice of readers is what makes it hold for mixture-of-experts models.)

#include <map>
#include <string>
#include <vector>

#include "base/check.h"
#include "ir/graph.h"

namespace mi::quant {

// One place that can be smoothed: a norm node of a layer and everything that reads its result.
struct SmoothSite {
  int32_t layer = 0;
  std::string value;                 // the norm's result in the graph, e.g. "m"
  std::string norm_weight;           // full name
  bool plus_one = false;             // the norm multiplies by (1 + w)
  std::vector<std::string> readers;  // full names of matrices [.., N, K] whose columns are `value`'s channels
  int64_t channels = 0;
};

// Every site of the graph. A norm whose result is read by anything but matrices is left out, with the reason in
// *skipped.
std::vector<SmoothSite> smooth_sites(const ir::Graph& g, std::vector<std::string>* skipped);

// act_max and weight_max [channels]; channels that never fire or have no weight keep s = 1.
std::vector<float> smooth_scales(const std::vector<float>& act_max, const std::vector<float>& weight_max, double alpha);

}  // namespace mi::quant
