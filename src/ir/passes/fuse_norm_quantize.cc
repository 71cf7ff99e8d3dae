// A norm whose result is quantized writes int8 itself; the float result stays only where somebody reads it (the
// router):
//
//   y = rms_norm x, weight=n                         yq    = rms_norm x, weight=n : q8[T, H]
//   q = quantize y                            →      y, q  = rms_norm x, weight=n : f32[T, H], q8[T, H]
//
// A quantize with a stored scale (in_scale) is left alone: the norm kernel computes scales per row.

#include "ir/passes/rewrite.h"

namespace mi::ir {
namespace {

bool fuse_one_norm(Block& b) {
  const Uses u(b);
  for (Node& q : b.nodes) {
    if (q.op != Op::kQuantize || q.pinned || !q.weights.empty()) continue;
    const int32_t p = u.producer(q.in[0]);
    if (p < 0 || b.nodes[size_t(p)].op != Op::kRmsNorm || b.nodes[size_t(p)].pinned) continue;
    Node& norm = b.nodes[size_t(p)];
    if (norm.out.size() == 2)
      replace_uses(b, q.out[0], norm.out[1]);
    else
      norm.out.push_back(q.out[0]);
    if (u.absorbable(q.in[0])) norm.out.erase(norm.out.begin());
    remove_node(q);
    tidy(b);
    return true;
  }
  return false;
}

}  // namespace

bool fuse_norm_quantize(Block& b, const FusionRules&) {
  return until_none(b, fuse_one_norm);
}

}  // namespace mi::ir
