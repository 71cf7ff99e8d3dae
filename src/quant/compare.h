#pragma once
// How far a rounded model is from its float form: the residual stream after each layer, and the predictions.

#include <span>

#include "quant/piece_engine.h"

namespace mi::quant {

struct LayerDeviation {
  int32_t layer = 0;
  double relative_rms = 0;  // rms(rounded - float) / rms(float) of the residual stream after the layer
  double cosine = 0;
  double weight_error = 0;  // rms of the rounding of the layer's weights over their rms
};
LayerDeviation deviation(int32_t layer, std::span<const float> reference, std::span<const float> rounded);

struct Predictions {
  int64_t tokens = 0, scored = 0;  // scored: those with a next token in their sequence
  double mean_kl = 0, max_kl = 0;  // KL(float || rounded) of the next token, in nats
  double top1_agreement = 0;
  double nll = 0, rounded_nll = 0;  // per scored token: log perplexity of both
  double nll_error = 0;             // standard error of rounded_nll - nll; 0 of fewer than two sequences
};

// Standard error of sum(x) / sum(n) over independent groups of n values with the sum x: tokens of a sequence are not
// independent of each other, sequences are. 0 of fewer than two groups.
double error_of_mean(std::span<const double> x, std::span<const int64_t> n);

// heads: pieces of both ends (PieceEngine::run_head) that turn the residual streams [tokens, hidden] into logits.
Predictions compare_predictions(const Sequences& s, PieceEngine& head, std::span<const float> residual,
                                PieceEngine& rounded_head, std::span<const float> rounded_residual);

// log(sum of exp(v)), in double arithmetic.
double log_sum_exp(const float* v, int64_t n);

// KL divergence of softmax(a) from softmax(b), in nats; double arithmetic.
double kl_divergence(const float* a, const float* b, int64_t n);

}  // namespace mi::quant
