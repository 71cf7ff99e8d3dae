#pragma once
// Recording which experts the tokens of real text choose, and evidence for what keeping hot ones is worth, learnt from the
// first half of the tokens and judged on the second.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "artifact/expert_profile.h"
#include "compiler/expert_order.h"
#include "exec/engine.h"

namespace mi::tools {

using artifact::ExpertProfile;

// Runs the sequences as prompts until `tokens` tokens are seen. Precondition: sequences fit the engine's KV pages.
ExpertProfile record_experts(exec::Engine& engine, const std::vector<std::vector<int32_t>>& sequences, int64_t tokens);

// How likely a token chooses each expert, by layer: exec::LoadOptions::expert_chances.
std::map<int32_t, std::vector<float>> expert_chances(const ExpertProfile& p);

struct ExpertEvidence {
  std::vector<compiler::ExpertSpread> layers;  // as those of the profile
  double covered[3] = {}, even[3] = {};  // all layers; if every expert were equally likely
  struct Cache {
    double share = 0;             // of all experts that there is room for
    double plain = 0, prior = 0;  // hit rate of the second half, token by token: used last; with the first half's chances
  };
  std::vector<Cache> caches;
};
ExpertEvidence weigh_experts(const ExpertProfile& p);

std::string order_evidence_text(const std::vector<compiler::LayerOrder>& layers);
std::string expert_evidence_text(const ExpertProfile& p, const ExpertEvidence& e);

}  // namespace mi::tools
