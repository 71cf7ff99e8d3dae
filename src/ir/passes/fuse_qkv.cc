// Projections of attention that read the same value become one matrix product over stacked weights:
//
//   q = linear a, weight=attn.q.weight          qkv = linear a, weight=[attn.q.weight, attn.k.weight,
//   k = linear a, weight=attn.k.weight    →                             attn.v.weight]
//   v = linear a, weight=attn.v.weight          q   = slice qkv {len=...}
//                                               k   = slice qkv {start=... len=...}
//                                               v   = slice qkv {start=... len=...}
//
// The projections of the block index (marked `index`) join where their precision is the same; biases are stacked where
// every member has one, and members with and without stay in groups of their own. Slices are views: they cost nothing.

#include "ir/passes/rewrite.h"

namespace mi::ir {
namespace {

bool candidate(const Block& b, const Uses& u, const Node& n) {
  if (!stackable(b, n) || u.is_output(n.out[0])) return false;
  const Mark m = single_weight(b, n, Role::kWeight)->mark;
  return m == Mark::kAttention || m == Mark::kIndex;
}

// Replaces the linears at these positions (ascending) by one and its slices.
void stack(Block& b, const std::vector<size_t>& members) {
  Node fused;
  fused.op = Op::kLinear;
  fused.in = b.nodes[members[0]].in;
  fused.params = LinearParams{};
  fused.weights = b.nodes[members[0]].weights;
  for (WeightUse& u : fused.weights) u.weights.clear();

  std::vector<Node> slices;
  ValueType type = b.values[size_t(b.nodes[members[0]].out[0])].type;
  type.cols = 0;
  for (size_t i : members) {
    Node& n = b.nodes[i];
    for (size_t r = 0; r < fused.weights.size(); ++r) fused.weights[r].weights.push_back(n.weights[r].weights[0]);
    Node slice;
    slice.op = Op::kSlice;
    slice.params = SliceParams{type.cols, b.values[size_t(n.out[0])].type.cols};
    slice.out = n.out;
    type.cols += b.values[size_t(n.out[0])].type.cols;
    slices.push_back(std::move(slice));
    remove_node(n);
  }
  fused.out = {new_value(b, "qkv", type)};
  for (Node& s : slices) s.in = fused.out;
  slices.insert(slices.begin(), std::move(fused));
  b.nodes.insert(b.nodes.begin() + ptrdiff_t(members[0]), std::make_move_iterator(slices.begin()),
                 std::make_move_iterator(slices.end()));
  tidy(b);
}

bool fuse_one_qkv(Block& b, const FusionRules& rules) {
  const Uses u(b);
  for (size_t i = 0; i < b.nodes.size(); ++i) {
    if (!candidate(b, u, b.nodes[i])) continue;
    std::vector<size_t> members{i};
    const auto cols = [&](size_t n) { return b.values[size_t(b.nodes[n].out[0])].type.cols; };
    int64_t total = cols(i);
    for (size_t j = i + 1; j < b.nodes.size(); ++j) {
      if (!candidate(b, u, b.nodes[j]) || !stack_together(b, b.nodes[i], b.nodes[j], rules)) continue;
      if (total + cols(j) > kMaxCols) continue;
      total += cols(j);
      members.push_back(j);
    }
    if (members.size() < 2) continue;
    stack(b, members);
    return true;
  }
  return false;
}

}  // namespace

bool fuse_qkv(Block& b, const FusionRules& rules) {
  return until_none(b, [&](Block& x) { return fuse_one_qkv(x, rules); });
}

}  // namespace mi::ir
