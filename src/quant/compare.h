#pragma once
// Runs two engines of one model on the same tokens and measures how far they are apart.

#include <vector>

#include "exec/engine.h"
#include "quant/calibration_data.h"
#include "quant/quantize.h"

namespace mi::quant {

struct Comparison {
  std::vector<LayerDeviation> layers;  // weight_error left 0
  double mean_kl = 0, max_kl = 0, top1_agreement = 0;
  int64_t tokens = 0;
};

// KL(float || other) of the next-token distributions at every position of up to max_tokens tokens of `set`.
Comparison compare(exec::Engine& reference, exec::Engine& other, const CalibrationSet& set, int64_t max_tokens);

// KL divergence of softmax(a) from softmax(b), in nats; double arithmetic.
double kl_divergence(const float* a, const float* b, int64_t n);

}  // namespace mi::quant
