#pragma once
// What every pass needs: who makes and who reads a value, and which weights may be stacked. A pass edits nodes with the
// helpers of edit.h and calls tidy() after each rewrite.

#include <vector>

#include "ir/edit.h"
#include "ir/graph.h"
#include "ir/pipeline.h"

namespace mi::ir {

class Uses {
 public:
  explicit Uses(const Block& b);
  // The node that makes v, -1 for the block's inputs.
  int32_t producer(ValueId v) const { return producer_[size_t(v)]; }
  // Operands that read v, plus the block's outputs that are v.
  int32_t count(ValueId v) const { return count_[size_t(v)]; }
  bool is_output(ValueId v) const { return output_[size_t(v)]; }
  // Read by exactly one operand of one node: its reader may absorb it.
  bool absorbable(ValueId v) const { return count(v) == 1 && !is_output(v); }

 private:
  std::vector<int32_t> producer_, count_;
  std::vector<bool> output_;
};

// The node that makes v if it is of this op, not pinned, and v is absorbable, else nullptr.
const Node* absorbable_producer(const Block& b, const Uses& u, ValueId v, Op op);

const WeightUse* find_use(const Node& n, Role r);
// The only weight of a role; nullptr when the role is absent or names several.
const WeightDecl* single_weight(const Block& b, const Node& n, Role r);

// A linear that can be stacked with another: one matrix, no residual, no out_scale, not pinned.
bool stackable(const Block& b, const Node& n);
// stackable() both, reading the same value, of one format (of several float types where the rules allow), biases in both or
// in neither.
bool stack_together(const Block& b, const Node& a, const Node& c, const FusionRules& rules);

// The node takes the producer of its first input into itself: `fused` stands where the node stood and makes what it made.
void absorb_producer(Block& b, const Uses& u, Node& node, Node fused);

// One rewrite at a time, step(b) -> whether there was one, until there is none.
template <typename Step>
bool until_none(Block& b, Step step) {
  bool changed = false;
  while (step(b)) changed = true;
  return changed;
}

// ---- the passes, each in the file of its name
bool fold_constants(Block& b, const FusionRules& rules);
bool fuse_qkv(Block& b, const FusionRules& rules);
bool fuse_gate_up(Block& b, const FusionRules& rules);
bool fuse_norm_quantize(Block& b, const FusionRules& rules);
bool fuse_rope_append(Block& b, const FusionRules& rules);
bool fuse_residual(Block& b, const FusionRules& rules);
bool group_experts(Block& b, const FusionRules& rules);
bool fuse_activation_quantize(Block& b, const FusionRules& rules);
bool dead_code(Block& b, const FusionRules& rules);

}  // namespace mi::ir
