#pragma once
// MIR: the graph of a model as plain data. A model is a prologue (token ids -> residual stream), layers, and an
// epilogue (residual stream -> logits). Layers of the same form share one Block; a block names the layers it stands
// for, so a 90-layer model is a few blocks and passes run once per block, not once per layer.
//
// Values are single-assignment inside a block. Weights are referred to by the block's own weight declarations; a
// block's weight "attn.q.weight" is the tensor "layers.{layer}.attn.q.weight" of the MIR directory, one per layer of
// the block (prologue and epilogue weights carry their full name). Marks say what a weight is; passes rely on marks,
// never on name patterns.
//
// Text form: text.h prints and parses it, exactly round-trip. verify.h checks it.

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tensor/dtype.h"
#include "tensor/op.h"
#include "tensor/tensor_view.h"

namespace mi::ir {

// How a matrix's numbers are stored.
//   kFloat  dtype F32, BF16 or F16; the op that reads it takes a float activation
//   kW8A8   int8 [.., N, K] beside a float "<name>_scale" [.., N]; int8 activation (kQ8)
//   kW4A8   4 bits, rows as in tensor/int4.h: U8 [.., N, (K + 1) / 2] beside a float "<name>_scale" [.., N, groups], one
//           scale for `group` consecutive k, the last group may be shorter; int8 activation (kQ8)
enum class WeightFormat : uint8_t { kFloat, kW8A8, kW4A8 };

enum class Mark : uint8_t {
  kNone,
  kEmbedding,
  kHead,
  kNorm,
  kAttention,
  kIndex,
  kRouter,
  kExpert,
  kSharedExpert,
  kSharedGate,
  kDense,
  kConstant
};

// "attention", "shared_expert", ...; "none" for kNone. nullopt for an unknown name.
std::string_view mark_name(Mark m);
std::optional<Mark> mark_from_name(std::string_view name);

struct WeightDecl {
  std::string name;  // block-local ("moe.experts.gate.weight") or full in prologue and epilogue
  DType dtype = DType::kBF16;
  Shape shape;  // [N, K], [E, N, K], [N]: of the numbers, however they are stored
  WeightFormat format = WeightFormat::kFloat;
  Mark mark = Mark::kNone;
  int64_t group = 0;  // kW4A8: 32, 64 or 128
  bool operator==(const WeightDecl&) const = default;
};

// Columns of a value, rows of stacked matrices: more are illegal, so that products of two sizes stay inside int64.
inline constexpr int64_t kMaxCols = int64_t(1) << 40;
// "bf16", "w8a8", "w4a8_g128": the word of the text form.
std::string format_text(const WeightDecl& d);
inline bool is_quantized(const WeightDecl& d) { return d.format != WeightFormat::kFloat; }
inline bool same_format(const WeightDecl& a, const WeightDecl& b) {
  return a.format == b.format && a.dtype == b.dtype && a.group == b.group;
}
// Of the tensor that holds the numbers, and of its "<name>_scale" (quantized weights).
Shape stored_shape(const WeightDecl& d);
Shape scale_shape(const WeightDecl& d);

using ValueId = int32_t;

struct Value {
  std::string name;  // unique in its block; letters, digits, _
  ValueType type;
  bool operator==(const Value&) const = default;
};

// One operand made of weights: several names are matrices stacked along N (fused QKV).
struct WeightUse {
  Role role = Role::kWeight;
  std::vector<int32_t> weights;  // indices into Block::weights
  bool operator==(const WeightUse&) const = default;
};

struct Node {
  Op op = Op::kAdd;
  std::vector<ValueId> in, out;
  std::vector<WeightUse> weights;  // ordered by role
  OpParams params;
  bool pinned = false;  // no pass may fuse it; set for one run of the pipeline, no part of the text form
  bool operator==(const Node&) const = default;
};

struct Block {
  std::string name;             // "prologue", "epilogue", or the layer kind: "dense", "moe", "moe.sliding"
  std::vector<int32_t> layers;  // empty for prologue and epilogue; ascending, disjoint between blocks
  std::vector<WeightDecl> weights;
  std::vector<Value> values;  // numbered in order of definition: the inputs, then each node's results
  // Of a layer: the residual stream x, one each; of the prologue: none -> x; of the epilogue: x -> logits.
  std::vector<ValueId> inputs, outputs;
  std::vector<Node> nodes;  // in execution order
  bool operator==(const Block&) const = default;
};

// Facts about the model that no op carries.
struct ModelInfo {
  std::string name;        // served name by default, e.g. "mini-m3"
  std::string family;      // recipe that produced the graph, e.g. "minimax_m3"
  std::string model_type;  // config.json's
  int64_t vocab = 0, hidden = 0, layers = 0, max_positions = 0;
  std::vector<int64_t> eos_ids;
  int64_t bos_id = -1, pad_id = -1;
  bool operator==(const ModelInfo&) const = default;
};

struct Graph {
  ModelInfo info;
  Block prologue, epilogue;
  std::vector<Block> blocks;  // layer kinds; together their layers are 0..info.layers-1
  bool operator==(const Graph&) const = default;

  const Block& block_of(int32_t layer) const;
};

// "layers.7.attn.q.weight" from a block-local name; the name itself for layer < 0.
std::string full_name(const std::string& local, int32_t layer);

// Builds nodes in order; every call appends one node and returns its (first) result. Types are inferred; a node that
// infer() refuses gets a result of type f32[T, 0], and verify() reports it: shapes come from configs, so this is an
// error of the outside world, not a bug. A result name that is taken gets a number: "h", "h_2".
class BlockBuilder {
 public:
  explicit BlockBuilder(Block* b) : b_(b) {}
  ValueId input(std::string name, ValueType t);
  // The index of the declaration; one that is there already (equal in every field) is not declared again.
  int32_t weight(WeightDecl d);
  // Uses are sorted by role. Precondition: params is the alternative of op.
  ValueId node(Op op, std::vector<ValueId> in, std::vector<WeightUse> weights, OpParams params,
               std::string result_name);
  void output(ValueId v);

 private:
  Block* b_;
};

// The type of each result of a node, or why it is illegal. The one place where shapes of ops are decided. Never
// crashes, whatever the node holds. The number and kind of results follow from op and inputs, except for rms_norm,
// whose declared results decide between f32, q8, and both (in this order), and activation (f32 or q8); without declared
// results it is f32.
struct InferError {
  std::string message;
};
std::variant<std::vector<ValueType>, InferError> infer(const Block& b, const Node& n);

// A value name that no value of the block has: the hint, or the hint with the first free number ("qkv_2").
std::string fresh_name(const Block& b, const std::string& hint);

}  // namespace mi::ir
