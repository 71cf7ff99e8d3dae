#pragma once
// The final graph as the flat program that the executor runs: every layer's block written out, slices folded into
// operands, every other value a buffer with its lifetime, every weight operand one tensor of weights.bin. Nothing is
// read or placed here: memory_plan.h gives buffers their offsets, emit.h fills weights.bin.

#include <string>
#include <vector>

#include "artifact/types.h"
#include "base/result.h"
#include "ir/graph.h"

namespace mi::compiler {

// What becomes of float matrices. kKeep: BF16 stays BF16, F32 and F16 are stored as F32 (exact). kFp32: all F32
// (exact). kBf16: all BF16 (F32 and F16 are rounded). Matrices marked as router are F32 always: choosing experts is the
// one place where a rounding changes everything. Vectors are F32 always.
enum class FloatPrecision : uint8_t { kKeep, kFp32, kBf16 };
Result<FloatPrecision> parse_precision(const std::string& name);  // "", "fp32", "bf16"

// One tensor of weights.bin and where its numbers come from.
struct WeightPlan {
  artifact::WeightTensor tensor;     // name, packing, sizes; its place is not known yet
  std::vector<std::string> sources;  // full names in the MIR directory, stacked along N in this order
};

struct Program {
  std::vector<artifact::Buffer> buffers;  // without offsets
  std::vector<artifact::Instr> instrs;
  std::vector<artifact::LayerCache> caches;
  std::vector<WeightPlan> weights;  // in the order of first use
  int64_t max_k = 1;
};

// Precondition: g is verified. Error: a graph that is legal but that the executor has no form for (a block whose output
// is not a value of its own, two caches of one kind in a layer).
Result<Program> lower(const ir::Graph& g, FloatPrecision precision);

}  // namespace mi::compiler
