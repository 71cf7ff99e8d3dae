// What is known when the engine is built is not computed in every step, where that leaves every bit as it is:
//
//   e = embed weight=w                        →      x = embed weight=w {scale=12}
//   x = scale e {factor=12}
//
//   y = scale x {factor=1}                    →      (readers of y read x)
//
// Factors of two scales are not multiplied: their product rounds differently. Other constants never reach the graph:
// smoothing is part of the weights since quantization, biases are added in the epilogue of their product, and rope's sines
// and cosines are computed when the engine is loaded, one table for all layers with equal frequencies.

#include "ir/passes/rewrite.h"

namespace mi::ir {
namespace {

bool fold_one_constant(Block& b) {
  const Uses u(b);
  for (Node& scale : b.nodes) {
    if (scale.op != Op::kScale || scale.pinned) continue;
    const float factor = std::get<ScaleParams>(scale.params).factor;
    const int32_t p = u.producer(scale.in[0]);
    // An output of the block has to be made by one of its nodes, and x may be another output already.
    if (factor == 1 && (!u.is_output(scale.out[0]) || (p >= 0 && !u.is_output(scale.in[0])))) {
      replace_uses(b, scale.out[0], scale.in[0]);
      remove_node(scale);
      tidy(b);
      return true;
    }
    const Node* embed = absorbable_producer(b, u, scale.in[0], Op::kEmbed);
    if (!embed || std::get<EmbedParams>(embed->params).scale != 1) continue;
    Node folded = *embed;
    folded.params = EmbedParams{factor};
    absorb_producer(b, u, scale, std::move(folded));
    return true;
  }
  return false;
}

}  // namespace

bool fold_constants(Block& b, const FusionRules&) {
  return until_none(b, fold_one_constant);
}

}  // namespace mi::ir
