#pragma once
// Which experts the tokens of real text chose, as a file: evidence for what keeping hot experts is worth. All numbers that
// promise something are learnt from the first half of the tokens and judged on the second.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/result.h"
#include "exec/engine.h"

namespace mi::tools {

struct ExpertProfile {
  struct Layer {
    int32_t layer = 0;
    int64_t experts = 0, k = 0;
    std::vector<int32_t> ids;  // [tokens, k], ascending within a token
  };
  std::string model, source;   // model: the engine's name
  int64_t tokens = 0;
  std::vector<Layer> layers;
};

// Runs the sequences as prompts until `tokens` tokens are seen. Precondition: sequences fit the engine's KV pages.
ExpertProfile record_experts(exec::Engine& engine, const std::vector<std::vector<int32_t>>& sequences, int64_t tokens);

Status write_expert_profile(const ExpertProfile& p, const Path& file, bool force);
// Errors (kBadInput): not such a file, or one of a model with other experts.
Result<ExpertProfile> read_expert_profile(const Path& file, const artifact::Manifest& m);

// How likely a token chooses each expert, by layer: exec::LoadOptions::expert_chances.
std::map<int32_t, std::vector<float>> expert_chances(const ExpertProfile& p);

struct ExpertEvidence {
  struct Layer {
    int32_t layer = 0;
    double skew = 0;              // the busiest expert's tokens over the mean
    double covered[3] = {};       // of the second half's choices, by the first half's busiest 10, 25 and 50 % of experts
  };
  std::vector<Layer> layers;
  double covered[3] = {}, even[3] = {};  // all layers; if every expert were equally likely
  struct Cache {
    double share = 0;             // of all experts that there is room for
    double plain = 0, prior = 0;  // hit rate of the second half, token by token: used last; with the first half's chances
  };
  std::vector<Cache> caches;
};
ExpertEvidence weigh_experts(const ExpertProfile& p);

// What storing experts in another order would be worth: 4 KB pages of weights.bin that a token of the second half touches,
// as experts lie, and with those behind each other that the first half's tokens chose together.
struct OrderEvidence {
  double pages = 0, reordered = 0;
};
OrderEvidence weigh_order(const ExpertProfile& p, const artifact::Manifest& m);
std::string order_evidence_text(const OrderEvidence& e);
std::string expert_evidence_text(const ExpertProfile& p, const ExpertEvidence& e);

}  // namespace mi::tools
