// An activation of which only the int8 form is read writes that: between the matrices of an MLP no row of floats is stored.
//
//   h  = activation gate_up {...} : f32[T, I]      →      hq = activation gate_up {...} : q8[T, I]
//   hq = quantize h
//
// A quantize with a stored scale (in_scale) is left alone: the activation kernel computes scales per row. Experts have this
// inside grouped_experts.

#include "ir/passes/rewrite.h"

namespace mi::ir {
namespace {

bool fuse_one_activation_quantize(Block& b) {
  const Uses u(b);
  for (Node& q : b.nodes) {
    if (q.op != Op::kQuantize || q.pinned || !q.weights.empty()) continue;
    const Node* act = absorbable_producer(b, u, q.in[0], Op::kActivation);
    if (!act) continue;
    absorb_producer(b, u, q, *act);
    return true;
  }
  return false;
}

}  // namespace

bool fuse_activation_quantize(Block& b, const FusionRules&) {
  return until_none(b, fuse_one_activation_quantize);
}

}  // namespace mi::ir
