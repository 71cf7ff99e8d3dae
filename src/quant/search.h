#pragma once
// Mixed precision: a format for each unit, so that a token takes the least time (or memory) while the model's
// predictions stay within a bound.
//
// The KL divergence of a choice is predicted from its units' own, as (sum of kl^p)^(1/p) with the p that fits all units
// rounded together (Sensitivity::power): kl^p is what adds up. Times are those of this machine's kernels (CostTable). The choices that nobody beats in all of KL, time,
// bytes and bits of the experts are the front; its convex part is found exactly: for each exchange rate of time (or bytes, or time and the experts'
// bytes) against it, every unit takes its best format on its own.

#include <limits>
#include <string>
#include <vector>

#include "quant/cost_table.h"
#include "quant/sensitivity.h"

namespace mi::quant {

struct MixedChoice {
  std::vector<LayerFormat> formats;  // by unit
  double kl = 0;                     // predicted
  double seconds = 0;                // of one token's products, as measured one by one
  int64_t bytes = 0;                 // of the units' weights
  double bits = 0;                   // per weight of all units
  double expert_bits = 0;            // per weight of experts (all units where there are none)
};

struct SearchLimits {
  double max_kl = std::numeric_limits<double>::infinity();
  int64_t max_bytes = std::numeric_limits<int64_t>::max();  // of the units' weights
  double max_bits = std::numeric_limits<double>::infinity();  // expert_bits
};

// Falling time, rising KL. s.candidates must hold every format of `formats` for every unit; kFloat needs none.
std::vector<MixedChoice> pareto_front(const Sensitivity& s, const CostTable& costs, const std::vector<LayerFormat>& formats,
                                      DType float_type);

// The fastest choice of the front within the limits; without a limit on KL, the one with the least. Errors say what the
// other limits allow.
Result<MixedChoice> pick(const std::vector<MixedChoice>& front, const SearchLimits& limits);

// Why each unit got its format, in a line: what it would cost otherwise.
std::vector<std::string> explain(const Sensitivity& s, const CostTable& costs, const MixedChoice& c,
                                 const std::vector<LayerFormat>& formats);

// Static activation scales wherever the sum of their KLs, which is more than all of them together cost, stays below the
// bound: the values that keep a scale per token, as "layers.3.h", the worst first.
std::vector<const Candidate*> per_token_values(const Sensitivity& s, double max_kl);

// Units that stay float so that the predicted KL of the others in format f is within the bound: the fewest.
std::vector<const Candidate*> float_units(const Sensitivity& s, LayerFormat f, double max_kl);

// `base` with the search's answers in it, as YAML that reproduces the run.
std::string recipe_text(const QuantConfig& c, const std::vector<std::string>& comments);

std::string front_text(const std::vector<MixedChoice>& front, const MixedChoice* picked);
Json front_json(const std::vector<MixedChoice>& front, const Sensitivity& s);

}  // namespace mi::quant
