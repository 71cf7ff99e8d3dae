// The chain of routed experts becomes one node, which one kernel runs expert by expert:
//
//   g  = expert_linear x, r, weight=gate
//   u  = expert_linear x, r, weight=up
//   h  = activation g, u {...}                →      m = grouped_experts x, r, gate=gate, up=up, down=down {...}
//   hq = quantize h                                  (a residual of expert_combine stays the last input)
//   y  = expert_linear hq, r, weight=down
//   m  = expert_combine y, r
//
// quantize is there exactly when the down weights are quantized; its stored scale (in_scale) comes along. Every value
// between has to have no other reader, and all four nodes have to follow the same route.

#include "ir/passes/rewrite.h"

namespace mi::ir {
namespace {

bool is_expert(const Block& b, const Node& n) {
  const WeightDecl* d = single_weight(b, n, Role::kWeight);
  return d && d->mark == Mark::kExpert;
}

void take(const Node& from, Role weight, Role bias, Node* to) {
  to->weights.push_back({weight, find_use(from, Role::kWeight)->weights});
  if (const WeightUse* u = find_use(from, Role::kBias)) to->weights.push_back({bias, u->weights});
}

bool group_one_block(Block& b) {
  const Uses u(b);
  for (Node& combine : b.nodes) {
    if (combine.op != Op::kExpertCombine || combine.pinned) continue;
    const ValueId route = combine.in[1];
    const Node* down = absorbable_producer(b, u, combine.in[0], Op::kExpertLinear);
    if (!down || down->in[1] != route || !is_expert(b, *down)) continue;

    ValueId h = down->in[0];
    const Node* quantize = absorbable_producer(b, u, h, Op::kQuantize);
    if (quantize) h = quantize->in[0];
    const Node* act = absorbable_producer(b, u, h, Op::kActivation);
    if (!act || act->in.size() != 2) continue;

    const Node* gate = absorbable_producer(b, u, act->in[0], Op::kExpertLinear);
    const Node* up = absorbable_producer(b, u, act->in[1], Op::kExpertLinear);
    if (!gate || !up || gate->in != up->in || gate->in[1] != route || !is_expert(b, *gate) || !is_expert(b, *up))
      continue;
    if (!same_format(*single_weight(b, *gate, Role::kWeight), *single_weight(b, *up, Role::kWeight))) continue;
    if (b.values[size_t(gate->in[0])].type.rows != Rows::kToken) continue;

    const auto& a = std::get<ActivationParams>(act->params);
    Node fused{Op::kGroupedExperts, gate->in, combine.out, {}, GroupedExpertsParams{a.kind, a.alpha, a.limit, false}};
    fused.in.insert(fused.in.end(), combine.in.begin() + 2, combine.in.end());
    take(*gate, Role::kGate, Role::kGateBias, &fused);
    take(*up, Role::kUp, Role::kUpBias, &fused);
    take(*down, Role::kDown, Role::kDownBias, &fused);
    if (quantize) {
      std::get<GroupedExpertsParams>(fused.params).saturate = std::get<QuantizeParams>(quantize->params).saturate;
      fused.weights.insert(fused.weights.end(), quantize->weights.begin(), quantize->weights.end());
    }

    const ValueId inner[] = {act->in[0], act->in[1], h, down->in[0], combine.in[0]};
    for (ValueId v : inner) remove_node(b.nodes[size_t(u.producer(v))]);
    combine = std::move(fused);
    tidy(b);
    return true;
  }
  return false;
}

}  // namespace

bool group_experts(Block& b, const FusionRules&) {
  return until_none(b, group_one_block);
}

}  // namespace mi::ir
