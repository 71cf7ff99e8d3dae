#pragma once
// The files of a planned checkpoint: shards with an index (one file without an index when all fits in it), streamed
// from the mapped weights of the MIR.

#include "base/file.h"
#include "base/util.h"
#include "tools/hf/plan.h"

namespace mi::tools::hf {

struct Written {
  uint64_t bytes = 0;  // of tensors
  int64_t files = 0;
  int64_t rounded = 0;   // tensors with numbers that their type does not hold exactly
  int64_t groups = 0;    // of int4 weights
  int64_t negative = 0;  // of these: with a scale below zero that has to stay (a number of the group is -8)
};

// Into `out`, a folder that is being made. Shards are cut at tensor borders near shard_bytes.
Result<Written> write_files(const ir::MirDir& m, const FilePlan& plan, const Path& out, uint64_t shard_bytes,
                            Progress* progress);

uint64_t tensor_bytes(const FilePlan& plan);

// One group of int4 numbers, two a byte as in tensor/int4.h, with its scale: where the scale is below zero and no
// number is -8, both change sign, which leaves every product as it is. False: a scale below zero stays.
bool make_positive(uint8_t* halves, int64_t count, float* scale);

}  // namespace mi::tools::hf
