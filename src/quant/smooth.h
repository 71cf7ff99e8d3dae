#pragma once
// SmoothQuant: moves the difficulty of outlier channels from activations into weights. For a value `a` that matrices
// read,
//   s_j = max|a_j|^alpha / max_readers |W_j|^(1 - alpha)
// whatever makes `a` divides channel j by s_j, and the columns of *every* reader of `a` are multiplied by s_j. The
// function of the float model does not change. (Xiao et al., "SmoothQuant", 2022; the choice of readers is what makes it
// hold for mixture-of-experts models.) What can make `a`:
//   a norm: its weight is divided. Readers are q, k, v, index projections, or the router, all experts, the shared
//     expert and its gate.
//   an activation act(gate) * up: the rows of up are divided, per expert where the matrices are experts'. Only down
//     reads it.

#include <map>
#include <set>
#include <string>
#include <vector>

#include "ir/mir_dir.h"
#include "quant/capture.h"
#include "quant/choice.h"
#include "quant/config.h"

namespace mi::quant {

// One place of a block that can be smoothed.
struct SmoothSite {
  std::string value;             // in the graph, e.g. "m"
  int64_t channels = 0;
  std::vector<int32_t> readers;  // weights of the block [.., N, K] whose columns are the value's channels
  int32_t norm = -1;             // the norm's weight, or ...
  bool plus_one = false;         // the norm multiplies by (1 + w)
  int32_t up = -1;               // ... the matrix whose rows are the value's channels
  bool experts = false;          // one set of scales per expert
};

// Every site of the block. One whose value is read by anything but matrices is left out, with the reason in *skipped.
std::vector<SmoothSite> smooth_sites(const ir::Block& b, bool down, std::vector<std::string>* skipped);

// act_max and weight_max [channels]; channels that never fire or have no weight keep s = 1.
std::vector<float> smooth_scales(const std::vector<float>& act_max, const std::vector<float>& weight_max, double alpha);

// What smoothing does to one tensor.
struct Smoothed {
  std::vector<float> column_scale;  // columns are multiplied: [K], or [E, K]; empty: not
  std::vector<float> row_divisor;   // rows are divided: [N], or [E, N]
  std::vector<float> norm_divisor;  // a norm's weight is divided: [K]
  bool plus_one = false;            // ... of a (1 + w) norm
};

struct LayerSmoothing {
  std::map<std::string, Smoothed> tensors;           // by full name
  std::map<std::string, std::vector<float>> divisor;  // by value: what its channels are divided by, [K] or [E, K]
  std::map<std::string, double> alpha;               // by value, where it was searched
};

// Names of all tensors that smoothing will change, known before any number is.
std::set<std::string> smoothed_tensors(const ir::MirDir& mir, const Choice& choice, bool down);

// The sites of a layer that are smoothed.
int64_t smoothed_sites(const ir::MirDir& mir, const ir::Block& b, int32_t layer, const Choice& choice, bool down);

// Scales of all sites of a layer with a reader that `choice` rounds. With config.search_alpha each site takes the alpha
// of 0.4, 0.45 .. 0.8 whose rounded outputs are nearest to the float ones on the captured rows.
LayerSmoothing plan_smoothing(const ir::MirDir& mir, const ir::Block& block, const Choice& choice,
                              const LayerCapture& seen, const QuantConfig& config, hw::ThreadPool& pool,
                              std::vector<std::string>* notes);

// Largest |W[.., k]| over all rows of a float matrix per column; experts >= 0: of that one only.
std::vector<float> column_max(const TensorView& w, int64_t expert, hw::ThreadPool& pool);

}  // namespace mi::quant
