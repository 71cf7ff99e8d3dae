// A matrix product, or the combination of experts, that is added to another value takes the sum into its epilogue:
//
//   o = linear a, weight=w                           x2 = linear a, x, weight=w {out_scale=0.25}
//   s = scale o {factor=0.25}                 →
//   x2 = add x, s
//
//   m = expert_combine y, r                   →      x2 = expert_combine y, r, x
//   x2 = add x, m
//
// Each product has to have no other reader. The fused node stands where the add stood, so the other operand is defined.
// Sums keep their pairs: x + (y + z) never becomes (x + y) + z, so a node that has a residual already is left alone.

#include "ir/passes/rewrite.h"

namespace mi::ir {
namespace {

// linear, then scale: the factor moves into out_scale. A second factor would have to be multiplied with the first,
// which rounds differently.
bool absorb_scale(Block& b) {
  const Uses u(b);
  for (Node& scale : b.nodes) {
    if (scale.op != Op::kScale || scale.pinned) continue;
    const Node* linear = absorbable_producer(b, u, scale.in[0], Op::kLinear);
    if (!linear || linear->in.size() != 1 || std::get<LinearParams>(linear->params).out_scale != 1) continue;
    Node fused = *linear;
    fused.params = LinearParams{std::get<ScaleParams>(scale.params).factor};
    absorb_producer(b, u, scale, std::move(fused));
    return true;
  }
  return false;
}

// The position of the node that can take the sum over from an add whose operand is v, or -1.
int32_t absorber(const Block& b, const Uses& u, ValueId v) {
  if (const Node* n = absorbable_producer(b, u, v, Op::kLinear)) return n->in.size() == 1 ? u.producer(v) : -1;
  for (Op op : {Op::kExpertCombine, Op::kGroupedExperts})
    if (const Node* n = absorbable_producer(b, u, v, op)) return n->in.size() == 2 ? u.producer(v) : -1;
  return -1;
}

bool absorb_add(Block& b) {
  const Uses u(b);
  for (Node& add : b.nodes) {
    if (add.op != Op::kAdd || add.pinned) continue;
    for (size_t side : {size_t(1), size_t(0)}) {
      const int32_t p = absorber(b, u, add.in[side]);
      if (p < 0) continue;
      Node fused = b.nodes[size_t(p)];
      fused.in.push_back(add.in[1 - side]);
      fused.out = add.out;
      remove_node(b.nodes[size_t(p)]);
      add = std::move(fused);
      tidy(b);
      return true;
    }
  }
  return false;
}

}  // namespace

bool fuse_residual(Block& b, const FusionRules&) {
  const bool scaled = until_none(b, absorb_scale);
  return until_none(b, absorb_add) || scaled;
}

}  // namespace mi::ir
