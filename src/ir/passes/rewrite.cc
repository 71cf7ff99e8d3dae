#include "ir/passes/rewrite.h"

#include <utility>

namespace mi::ir {

Uses::Uses(const Block& b)
    : producer_(b.values.size(), -1), count_(b.values.size(), 0), output_(b.values.size(), false) {
  for (size_t i = 0; i < b.nodes.size(); ++i) {
    for (ValueId v : b.nodes[i].out) producer_[size_t(v)] = int32_t(i);
    for (ValueId v : b.nodes[i].in) ++count_[size_t(v)];
  }
  for (ValueId v : b.outputs) {
    ++count_[size_t(v)];
    output_[size_t(v)] = true;
  }
}

const Node* absorbable_producer(const Block& b, const Uses& u, ValueId v, Op op) {
  const int32_t p = u.producer(v);
  if (p < 0 || !u.absorbable(v)) return nullptr;
  const Node& n = b.nodes[size_t(p)];
  return n.op == op && !n.pinned ? &n : nullptr;
}

const WeightUse* find_use(const Node& n, Role r) {
  for (const WeightUse& u : n.weights)
    if (u.role == r) return &u;
  return nullptr;
}

const WeightDecl* single_weight(const Block& b, const Node& n, Role r) {
  const WeightUse* u = find_use(n, r);
  return u && u->weights.size() == 1 ? &b.weights[size_t(u->weights[0])] : nullptr;
}

bool stackable(const Block& b, const Node& n) {
  return n.op == Op::kLinear && !n.pinned && n.in.size() == 1 && single_weight(b, n, Role::kWeight) &&
         std::get<LinearParams>(n.params).out_scale == 1;
}

bool stack_together(const Block& b, const Node& a, const Node& c, const FusionRules& rules) {
  if (!stackable(b, a) || !stackable(b, c) || a.in[0] != c.in[0]) return false;
  const auto fit = [&](const WeightDecl& x, const WeightDecl& y) {
    return same_format(x, y) || (!rules.same_precision_only && !is_quantized(x) && !is_quantized(y));
  };
  if (!fit(*single_weight(b, a, Role::kWeight), *single_weight(b, c, Role::kWeight))) return false;
  const WeightDecl *bias_a = single_weight(b, a, Role::kBias), *bias_c = single_weight(b, c, Role::kBias);
  if (!bias_a || !bias_c) return !bias_a && !bias_c;
  return fit(*bias_a, *bias_c);
}

void absorb_producer(Block& b, const Uses& u, Node& node, Node fused) {
  fused.out = node.out;
  remove_node(b.nodes[size_t(u.producer(node.in[0]))]);
  node = std::move(fused);
  tidy(b);
}

}  // namespace mi::ir
