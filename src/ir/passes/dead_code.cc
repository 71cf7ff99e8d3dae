// Nodes whose results nobody reads go, and with them the weights that only they read:
//
//   s = scale x {factor=2}                    →      y, q = rms_norm x, weight=n        (s went: nobody reads it)
//   y, q = rms_norm x, weight=n                      or, if nobody reads y:  q = rms_norm x, weight=n : q8[T, H]
//
// Appending to a cache is an effect and stays.

#include "ir/passes/rewrite.h"

namespace mi::ir {

bool dead_code(Block& b, const FusionRules&) {
  bool changed = false;
  const size_t weights = b.weights.size();
  std::vector<bool> live(b.values.size(), false);
  for (ValueId v : b.outputs) live[size_t(v)] = true;
  for (size_t i = b.nodes.size(); i-- > 0;) {
    Node& n = b.nodes[i];
    bool keep = n.op == Op::kKvAppend || n.op == Op::kIndexAppend;
    for (ValueId v : n.out) keep = keep || live[size_t(v)];
    if (!keep) {
      remove_node(n);
      changed = true;
      continue;
    }
    if (n.out.size() == 2) {  // a norm with both results
      const size_t before = n.out.size();
      std::erase_if(n.out, [&](ValueId v) { return !live[size_t(v)]; });
      changed = changed || n.out.size() != before;
    }
    for (ValueId v : n.in) live[size_t(v)] = true;
  }
  tidy(b);
  return changed || b.weights.size() != weights;
}

}  // namespace mi::ir
