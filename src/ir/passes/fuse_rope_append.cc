// Keys that are only rotated to be stored are rotated on their way into the cache:
//
//   kr = rope k, inv_freq=f {heads=2 ...}     →      kv = kv_append k, v, inv_freq=f {kv_heads=2 ... rotary_dim=...}
//   kv = kv_append kr, v {kv_heads=2 ...}
//
// The query's rope stays: attention reads its result many times.

#include "ir/passes/rewrite.h"

namespace mi::ir {
namespace {

bool fuse_one_rope_append(Block& b) {
  const Uses u(b);
  for (Node& append : b.nodes) {
    if (append.op != Op::kKvAppend || append.pinned) continue;
    auto& p = std::get<KvAppendParams>(append.params);
    if (p.rotary_dim != 0) continue;
    const Node* rope = absorbable_producer(b, u, append.in[0], Op::kRope);
    if (!rope) continue;
    const auto& r = std::get<RopeParams>(rope->params);
    if (r.heads != p.kv_heads || r.head_dim != p.k_dim) continue;
    p.rotary_dim = r.rotary_dim;
    p.interleaved = r.interleaved;
    p.attention_factor = r.attention_factor;
    append.weights = rope->weights;
    const int32_t at = u.producer(append.in[0]);
    append.in[0] = rope->in[0];
    remove_node(b.nodes[size_t(at)]);
    tidy(b);
    return true;
  }
  return false;
}

}  // namespace

bool fuse_rope_append(Block& b, const FusionRules&) {
  return until_none(b, fuse_one_rope_append);
}

}  // namespace mi::ir
