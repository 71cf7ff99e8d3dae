#pragma once
// The writing half of quantize: the plan of what happens to each tensor, and the streaming pass that does it.

#include <map>
#include <string>
#include <vector>

#include "hw/thread_pool.h"
#include "ir/mir_dir.h"
#include "quant/config.h"
#include "quant/int4.h"
#include "quant/int8.h"
#include "quant/smooth.h"

namespace mi::quant {

struct TensorPlan {
  const std::vector<float>* column_scale = nullptr;  // smoothing: columns are multiplied; [K]
  const std::vector<float>* norm_divisor = nullptr;  // smoothing: the norm's weight is divided; [K]
  bool plus_one = false;                             // ... of a (1 + w) norm
};

struct RewritePlan {
  std::map<std::string, TensorPlan> tensors;             // by full name; absent: copied or rounded as declared
  std::map<std::string, std::string> sources;            // a tensor that is made of another one of the source
  std::map<std::string, float> constants;                // "act.X.scale" tensors of one float
  WeightScheme int8_scheme = WeightScheme::kPerChannel;  // W8A8; W4A8 has its group in the declaration
};

// Writes every tensor that `g` declares, from `source`, through `writer`: float matrices that `g` declares W8A8 or W4A8
// are rounded. Memory: a few rows in float and one tensor in int8. Adds each matrix's rounding error to *errors by
// layer.
Status rewrite_tensors(const ir::MirDir& source, const ir::Graph& g, const RewritePlan& plan, ir::MirWriter& writer,
                       hw::ThreadPool& pool, std::map<int32_t, WeightError>* errors);

// Largest |W[.., k]| over all rows (and experts) of a float matrix, per column.
std::vector<float> column_max(const TensorView& w, hw::ThreadPool& pool);

// "layers.7.attn.q.weight" -> 7; -1 for tensors outside layers.
int32_t layer_of(const std::string& full_name);

}  // namespace mi::quant
