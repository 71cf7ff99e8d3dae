#pragma once
// Groups of experts by hand: which of a layer's experts the grouped kernel computes together. The answers do not change.

#include <cstdint>
#include <vector>

#include "artifact/types.h"
#include "base/result.h"

namespace mi::compiler {

struct ExpertGroups {
  std::vector<int32_t> layers;  // empty: all with experts
  // Either: groups of so many neighbours (the last may be smaller). Or: the members of each group, every expert in one.
  int64_t size = 0;
  std::vector<std::vector<int32_t>> members;
};

// Writes them into the program's grouped_experts. Errors name the layer and what does not fit.
Status set_expert_groups(const std::vector<ExpertGroups>& wanted, artifact::Manifest* m);

}  // namespace mi::compiler
