#pragma once
// Opens an engine directory: engine.json is parsed and validated (validate.h), weights.bin is mapped. After this the
// manifest can be believed: indices, offsets and sizes need no further checks. The numbers in weights.bin can be once
// verify_weights() or read_weights() compared every segment with its checksum.

#include <cstdint>
#include <functional>
#include <span>

#include "artifact/types.h"
#include "base/file.h"
#include "base/result.h"

namespace mi::artifact {

struct LoadedArtifact {
  Manifest manifest;   // validated
  MappedFile weights;  // weights.bin
  std::span<const std::byte> bytes;  // of weights.bin: the mapping, or the memory that read_weights() filled
  Path dir;
};

// done and total in bytes of weights.bin; called between parts of a segment, from the calling thread. May be empty.
using LoadProgress = std::function<void(int64_t done_bytes, int64_t total_bytes)>;

// Errors (kBadInput): not an engine directory, engine.json broken or of a newer format, weights.bin of another size.
Result<LoadedArtifact> open_artifact(const Path& dir);

// Calls the function for every task in [0, tasks), from any threads; worker 0 is the calling thread.
using ParallelFor = std::function<void(int64_t tasks, const std::function<void(int64_t task, int worker)>&)>;

// Every segment of weights.bin against its checksum, where it lies; the first that differs is named (kBadInput).
Status verify_weights(const LoadedArtifact& a, const ParallelFor& parallel, const LoadProgress& progress = {});

// Reads weights.bin into `to` (its size), segment by segment, checking the checksums on the way when asked. The mapping is
// given up and a->bytes is `to`, which must outlive it.
Status read_weights(LoadedArtifact* a, std::span<std::byte> to, bool verify_checksums, const ParallelFor& parallel,
                    const LoadProgress& progress = {});

// Parts of weights.bin. The tensor's elements: all experts, padding included; the scales of a kPackedI8 or
// kPackedI4 tensor as it stores them, in one of two types; column sums int32 [E][n_pad] of a kPackedI8 tensor. nullptr
// where a tensor has none.
inline const std::byte* view_weight(const LoadedArtifact& a, const WeightTensor& w) {
  return a.bytes.data() + w.offset;
}
inline const float* view_scales(const LoadedArtifact& a, const WeightTensor& w) {
  const bool has = w.packing == Packing::kPackedI8 || (w.packing == Packing::kPackedI4 && w.scale_dtype == DType::kF32);
  return has ? reinterpret_cast<const float*>(a.bytes.data() + w.scale_offset) : nullptr;
}
inline const uint16_t* view_scales_bf16(const LoadedArtifact& a, const WeightTensor& w) {
  const bool has = w.packing == Packing::kPackedI4 && w.scale_dtype == DType::kBF16;
  return has ? reinterpret_cast<const uint16_t*>(a.bytes.data() + w.scale_offset) : nullptr;
}
inline const int32_t* view_colsums(const LoadedArtifact& a, const WeightTensor& w) {
  return w.packing == Packing::kPackedI8 ? reinterpret_cast<const int32_t*>(a.bytes.data() + w.colsum_offset)
                                         : nullptr;
}

}  // namespace mi::artifact
