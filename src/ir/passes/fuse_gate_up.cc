// Gate and up projections of a dense or shared MLP become one matrix product:
//
//   g = linear a, weight=mlp.gate.weight             gate_up = linear a, weight=[mlp.gate.weight, mlp.up.weight]
//   u = linear a, weight=mlp.up.weight        →      h       = activation gate_up {...}
//   h = activation g, u {...}
//
// Routed experts are left to group_experts.

#include "ir/passes/rewrite.h"

namespace mi::ir {
namespace {

bool fuse_one_gate_up(Block& b, const FusionRules& rules) {
  const Uses u(b);
  for (Node& act : b.nodes) {
    if (act.op != Op::kActivation || act.pinned || act.in.size() != 2) continue;
    const Node* gate = absorbable_producer(b, u, act.in[0], Op::kLinear);
    const Node* up = absorbable_producer(b, u, act.in[1], Op::kLinear);
    if (!gate || !up || !stack_together(b, *gate, *up, rules)) continue;
    const Mark m = single_weight(b, *gate, Role::kWeight)->mark;
    if (m != single_weight(b, *up, Role::kWeight)->mark || (m != Mark::kDense && m != Mark::kSharedExpert)) continue;
    ValueType type = b.values[size_t(act.in[0])].type;
    type.cols *= 2;
    if (type.cols > kMaxCols) continue;

    const size_t at_gate = size_t(u.producer(act.in[0])), at_up = size_t(u.producer(act.in[1]));
    Node fused = *gate;
    for (size_t r = 0; r < fused.weights.size(); ++r) fused.weights[r].weights.push_back(up->weights[r].weights[0]);
    fused.out = {new_value(b, "gate_up", type)};
    act.in = fused.out;
    remove_node(b.nodes[std::max(at_gate, at_up)]);
    b.nodes[std::min(at_gate, at_up)] = std::move(fused);
    tidy(b);
    return true;
  }
  return false;
}

}  // namespace

bool fuse_gate_up(Block& b, const FusionRules& rules) {
  return until_none(b, [&](Block& x) { return fuse_one_gate_up(x, rules); });
}

}  // namespace mi::ir
