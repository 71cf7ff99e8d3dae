#pragma once
// Fills weights.bin: matrices into the packed layout (kernels/gemm/pack.h), vectors as padded floats, the embedding
// table as it is. Memory is bounded by one block of rows of one matrix (kChunkBytes), whatever the size of the model;
// source pages are given back once read.

#include "artifact/writer.h"
#include "base/util.h"
#include "compiler/lower.h"
#include "ir/mir_dir.h"

namespace mi::compiler {

inline constexpr int64_t kChunkBytes = 8 << 20;

// Most bytes that the weights will take in weights.bin, without padding between segments (scales of int4 may come out
// half as large, see emit_weights).
int64_t planned_bytes(const std::vector<WeightPlan>& weights);
// Bytes of one tensor with scales and column sums.
int64_t stored_bytes(const artifact::WeightTensor& t);

// Writes every tensor in order and fills its offsets. Errors: a number that is not finite (names tensor and place), a
// scale of an int8 matrix below 0, disk full. Scales of int4 become BF16 where all of a tensor's are BF16 numbers.
Status emit_weights(const ir::MirDir& mir, std::vector<WeightPlan>& weights, artifact::ArtifactWriter& out,
                    Progress* progress);

}  // namespace mi::compiler
