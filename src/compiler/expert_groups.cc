#include "compiler/expert_groups.h"

#include <algorithm>
#include <map>

namespace mi::compiler {
namespace {

int64_t experts_of(const artifact::Manifest& m, const artifact::Instr& i) {
  int64_t experts = 0;
  for (const artifact::InstrWeight& w : i.weights) experts = std::max(experts, m.weights[size_t(w.tensor)].experts);
  return experts;
}

Status check_members(const std::vector<std::vector<int32_t>>& groups, int64_t experts, int32_t layer) {
  std::vector<bool> seen(static_cast<size_t>(experts));
  for (const auto& group : groups)
    for (const int32_t e : group) {
      if (e < 0 || e >= experts)
        return bad_input("expert_groups: layer {} has experts 0 to {}, not {}", layer, experts - 1, e);
      if (seen[size_t(e)]) return bad_input("expert_groups: expert {} of layer {} is in two groups", e, layer);
      seen[size_t(e)] = true;
    }
  const auto missing = std::find(seen.begin(), seen.end(), false);
  if (missing != seen.end())
    return bad_input("expert_groups: expert {} of layer {} is in no group; every expert has to be in one",
                missing - seen.begin(), layer);
  return {};
}

}  // namespace

Status set_expert_groups(const std::vector<ExpertGroups>& wanted, artifact::Manifest* m) {
  if (wanted.empty()) return {};
  std::map<int32_t, artifact::Instr*> grouped;
  for (artifact::Instr& i : m->program)
    if (i.op == Op::kGroupedExperts) grouped[i.layer] = &i;
  if (grouped.empty())
    return bad_input("expert_groups: no layer has grouped experts; the model has none, or the pass group_experts is off");
  for (const ExpertGroups& g : wanted) {
    std::vector<int32_t> layers = g.layers;
    if (layers.empty())
      for (const auto& [layer, instr] : grouped) layers.push_back(layer);
    for (const int32_t layer : layers) {
      const auto it = grouped.find(layer);
      if (it == grouped.end())
        return bad_input("expert_groups: layer {} has no grouped experts", layer);
      artifact::Instr& i = *it->second;
      if (!i.groups.empty()) return bad_input("expert_groups: layer {} is given twice", layer);
      const int64_t experts = experts_of(*m, i);
      if (g.size > 0) {
        for (int64_t e = 0; e < experts; ++e) {
          if (e % g.size == 0) i.groups.emplace_back();
          i.groups.back().push_back(int32_t(e));
        }
        continue;
      }
      MI_TRY_VOID(check_members(g.members, experts, layer));
      i.groups = g.members;
    }
  }
  return {};
}

}  // namespace mi::compiler
