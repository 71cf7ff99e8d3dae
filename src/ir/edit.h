#pragma once
// Editing a graph: splitting and merging blocks, inserting nodes, changing how weights are stored. Passes build on it
// too.
//
// Edits may leave a block untidy: values appended in any order, removed nodes still there. tidy() ends an edit; it
// renumbers values, so ids that were noted before it are void.

#include <functional>
#include <string>

#include "base/result.h"
#include "ir/graph.h"

namespace mi::ir {

// ---- nodes and values
ValueId new_value(Block& b, const std::string& name_hint, ValueType t);  // a node has to make it before tidy()
void insert_node(Block& b, size_t at, Node n);                           // becomes b.nodes[at]
inline void remove_node(Node& n) { n = Node{}; }                         // tidy() drops it
void replace_uses(Block& b, ValueId from, ValueId to);                   // operands and block outputs
// Drops removed nodes (those without results), values that no node makes and weights that no node reads; numbers values
// in order of definition.
void tidy(Block& b);

// ---- weights
// How a matrix is to be stored: as it is (kFloat), W8A8, or W4A8 with a group.
struct QuantFormat {
  WeightFormat format = WeightFormat::kFloat;
  int64_t group = 0;
};
void set_format(WeightDecl& d, QuantFormat f);  // not kFloat
void set_float(WeightDecl& d, DType t);

// ---- blocks
// Splits every block whose layers have different keys, one block per key. The first part keeps the name, the others are
// numbered: "moe", "moe.2".
void split_layers(Graph& g, const std::function<std::string(const Block&, int32_t layer)>& key);
// Blocks that differ in name and layers only become one, under the first one's name.
void merge_equal_blocks(Graph& g);

// ---- quantization
// Stores the float matrices that `choose` gives a format in it, and gives their readers int8 inputs: one quantize node
// per distinct value, shared by all its readers. Blocks are split where the choice differs between layers (layer is -1
// for prologue and epilogue). What is quantized already stays. The tensors themselves are the caller's. Precondition:
// verify(g). An error says which chosen weight cannot be quantized (an embedding, a norm, one matrix of a stack); g is
// then half changed.
Status to_quantized(Graph& g, const std::function<QuantFormat(int32_t layer, const WeightDecl&)>& choose);
// The chosen ones to W8A8.
Status to_w8a8(Graph& g, const std::function<bool(int32_t layer, const WeightDecl&)>& chosen);

}  // namespace mi::ir
