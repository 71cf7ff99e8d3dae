#pragma once
// From "find it out" to a recipe: measures sensitivity on a model and fills in what a recipe leaves open.
//   sensitive_layers: auto     the fewest parts in float so that the others, rounded, stay within bound
//   activation_scheme: auto    static scales, except where a scale per token is needed to stay within bound
//   saturation: layers: auto   where a scale that saturates leaves the layer a smaller error
//   search                     a format per part: the fastest within the limits

#include <optional>
#include <string>
#include <vector>

#include "quant/calibration_data.h"
#include "quant/quantize.h"
#include "quant/search.h"

namespace mi::quant {

struct PlanOptions {
  bool search = false;
  SearchLimits limits;
  std::vector<LayerFormat> formats = {LayerFormat::kFloat, LayerFormat::kInt8, LayerFormat::kInt4G128,
                                      LayerFormat::kInt4G64, LayerFormat::kInt4G32};
  int64_t sample_tokens = 512;
};

struct Planned {
  QuantConfig config;  // nothing left open: written as YAML it gives the same bytes
  Sensitivity sensitivity;
  std::vector<MixedChoice> front;  // of a search
  CostTable costs;
  std::optional<MixedChoice> picked;
  std::vector<std::string> found;    // what the autos found, a line each
  std::vector<std::string> reasons;  // ... and, of a search, why each part has its format
};

bool needs_plan(const QuantConfig& c);

// o.output names a place beside which temporary files may lie.
Result<Planned> plan_recipe(const QuantizeOptions& o, const PlanOptions& p, hw::ThreadPool& pool);

// Searches, quantizes, and looks at what came out: while perplexity grows by more than max_drop percent, or the mean KL
// is above limits.max_kl, it goes back to a choice that promises proportionally less, a few times. The last result stays.
struct Searched {
  Planned plan;
  QuantizeReport report;
  int64_t tries = 0;
};
Result<Searched> quantize_searched(const QuantizeOptions& o, PlanOptions p, std::optional<double> max_drop,
                                   hw::ThreadPool& pool);

// The calibration text that a recipe names, for this model.
Result<CalibrationSet> calibration_of(const ir::MirDir& mir, const QuantizeOptions& o);

// All of another text, cut in the same way.
Result<CalibrationSet> other_text(const ir::MirDir& mir, const QuantizeOptions& o, const Path& file);

// Refuses an output that could not be put in its place, before minutes of measuring; nothing stays.
Status check_output(const QuantizeOptions& o);

}  // namespace mi::quant
