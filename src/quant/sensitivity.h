#pragma once
// What rounding each part of a model would cost, alone: the error of its layer's output, and the KL divergence of the
// model's predictions when everything else stays float.
//
// One walk through the layers answers for all parts. At a layer, each candidate's rounded form runs on the float
// residual stream of a sample of tokens; what comes out joins the candidates of earlier layers, and all of them go
// through the float form of every later layer together. At the head each is compared with the float model. Beside them
// one stream per measured format goes through layers with all of their parts rounded: what the parts' losses add up to.
// Memory holds one layer and a residual stream per candidate.

#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/json.h"
#include "quant/piece_engine.h"
#include "quant/units.h"

namespace mi::quant {

struct Candidate {
  std::string name;            // a unit's name, or for a static activation scale "layers.3.h"
  int32_t layer = 0;
  LayerFormat format = LayerFormat::kInt8;
  bool static_scale = false;   // the matrices that read one value, int8 with one activation scale from calibration
  std::string value;           // ... that value
  double error = 0;            // rms(rounded - float) / rms(what the layer adds to the residual stream)
  double cosine = 1;           // of what the layer adds
  double kl = 0;               // mean over the sample, in nats; estimated from the error where it was not measured
  bool measured = false;
};

// A value that matrices read has massive activations when its largest number stands alone: a scale that holds it loses
// all the others. Large, and far above the usual number (Sun et al., "Massive Activations in Large Language Models",
// 2024: above 100, and about 1000 times the median), and only in few tokens. Outlier channels, which every token has,
// are a matter for smoothing; a gated activation's many numbers near zero alone make no other number massive.
inline constexpr double kMassiveLargest = 100, kMassiveToMedian = 1000;
inline constexpr int64_t kMassivePermille = 100;  // of the rows, at most
struct Peak {
  int32_t layer = 0;
  std::string value;
  double largest = 0, rms = 0, median = 0;  // of |x| over the kept rows
  int64_t token_share_permille = 0;  // of the kept rows, how many have a number above a tenth of the largest
  double ratio() const { return rms > 0 ? largest / rms : 0; }
  bool massive() const {
    return largest > kMassiveLargest && largest > kMassiveToMedian * median && token_share_permille <= kMassivePermille;
  }
};
// Of a value [rows, cols].
Peak peak_of(int32_t layer, const std::string& value, std::span<const float> rows, int64_t cols);

// The matrices that read one value, at int8: with a scale per token, and with one that saturates.
struct Saturation {
  int32_t layer = 0;
  std::string value;
  double per_token = 0, saturated = 0;  // error of the layer's output, as Candidate::error
};

// All units rounded together, against what their own KLs say.
struct Joint {
  LayerFormat format = LayerFormat::kInt8;
  double kl = 0, sum = 0;
};

struct Sensitivity {
  std::vector<Unit> units;
  std::vector<Candidate> candidates;
  std::vector<Joint> joint;  // of the measured formats
  // What many units cost together: (sum of their kl^power)^(1/power). Each rounding alone flips some near ties already,
  // of experts for one; together they do not flip as many more, so that plain sums (power 1) promise several times the
  // loss that there is. The power that fits `joint`.
  double power = 1;
  std::vector<Saturation> saturation;  // of every value, where it was asked for
  std::vector<Peak> peaks;  // of every value: massive ones first, then by ratio
  int64_t tokens = 0;       // of the sample
  double nll = 0;           // of the float model on the sample, per token

  const Candidate* find(const std::string& name, LayerFormat f) const;  // units only
  double together(const std::vector<double>& kl) const;
  // From `joint` and the candidates.
  void fit_power();
  // Layers by what int8 costs them, those with massive activations first: what a reader wants to see first.
  std::vector<int32_t> order() const;
};

struct SensitivityOptions {
  QuantConfig config;                                       // smoothing, rounding, observers of the candidates
  std::vector<LayerFormat> formats = {LayerFormat::kInt8, LayerFormat::kInt4G32};
  std::vector<LayerFormat> measured = {LayerFormat::kInt8, LayerFormat::kInt4G32};  // the others are estimated
  bool activations = false;                                 // candidates for static scales too
  bool saturation = false;                                  // try scales that saturate
  int64_t sample_tokens = 512;
  Path scratch;                                             // a free name for temporary engines
};

// mir: float. sequences: calibration text; the sample is taken from its end.
Result<Sensitivity> measure_sensitivity(const ir::MirDir& mir, const Sequences& sequences, const SensitivityOptions& o,
                                        hw::ThreadPool& pool);

std::string sensitivity_text(const Sensitivity& s);
Json sensitivity_json(const Sensitivity& s);

}  // namespace mi::quant
