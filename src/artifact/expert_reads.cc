#include "artifact/expert_reads.h"

#include "artifact/layout.h"
#include "base/check.h"

namespace mi::artifact {

std::span<const Role> expert_roles(const Instr& i) {
  static constexpr Role kGrouped[] = {Role::kGate, Role::kUp, Role::kDown}, kLinear[] = {Role::kWeight};
  if (i.op == Op::kGroupedExperts) return kGrouped;
  if (i.op == Op::kExpertLinear) return kLinear;
  return {};
}

const WeightTensor& tensor_of(const Manifest& m, const Instr& i, Role role) {
  const auto w = std::find_if(i.weights.begin(), i.weights.end(), [&](const InstrWeight& x) { return x.role == role; });
  MI_CHECK(w != i.weights.end(), "'{}' of layer {} has no {}", i.name, i.layer, role_name(role));
  return m.weights[size_t(w->tensor)];
}

bool has_scale_matrix(const WeightTensor& w) { return w.packing == Packing::kPackedI4; }

std::vector<ExpertMatrix> expert_matrices(const Manifest& m, const Instr& i) {
  std::vector<ExpertMatrix> all;
  for (const Role role : expert_roles(i)) {
    const WeightTensor& w = tensor_of(m, i, role);
    all.push_back({w.offset, w.expert_stride, w.expert_stride});
    const int64_t scales = scale_bytes(w) / w.experts;
    if (has_scale_matrix(w)) all.push_back({w.scale_offset, scales, scales});
  }
  return all;
}

}  // namespace mi::artifact
