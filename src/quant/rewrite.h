#pragma once
// The rounding half of quantize: what becomes of the tensors of one layer.

#include <map>
#include <memory>
#include <string>

#include "base/result.h"
#include "ir/mir_dir.h"
#include "quant/capture.h"
#include "quant/config.h"
#include "quant/int8.h"
#include "quant/smooth.h"

namespace mi::quant {

struct LayerPlan {
  LayerSmoothing smoothing;
  std::map<std::string, std::string> sources;   // a tensor that is made of another one of the source
  std::map<std::string, float> constants;       // "act.X.scale" tensors of one float
  const LayerCapture* seen = nullptr;           // null: everything is rounded to nearest
};

struct RoundedLayer {
  // Every tensor that differs from the source: rounded matrices with their scales, smoothed and widened ones, constants.
  std::map<std::string, std::shared_ptr<const Tensor>, std::less<>> made;
  WeightError error;
  int64_t spread = 0;  // matrices whose rounding errors were spread, experts counted one by one
  int64_t alone = 0;   // ... that calibration never reached: rounded to nearest
};

// Whether the rounding errors of a matrix are spread over its columns (gptq.h); it needs calibration.
bool wants_spread(const ir::WeightDecl& d, const QuantConfig& c);

// Tensors of block `b` (layer < 0: prologue or epilogue) of the graph that will be written, from `source`. Memory: the
// rounded layer, a few rows in float, and with error spreading a few [K, K] per thread.
RoundedLayer round_layer(const ir::MirDir& source, const ir::Block& b, int32_t layer, const LayerPlan& plan,
                         const QuantConfig& config, hw::ThreadPool& pool);

// The numbers of block `b` (layer < 0: prologue or epilogue) in the source: a NaN or an infinity is an error that names
// tensor and place. Before anything is computed with them: a piece's engine would call them by the piece's names.
Status check_finite(const ir::MirDir& mir, const ir::Block& b, int32_t layer, hw::ThreadPool& pool);

// "layers.7.attn.q.weight" -> 7; -1 for tensors outside layers.
int32_t layer_of(const std::string& full_name);

}  // namespace mi::quant
