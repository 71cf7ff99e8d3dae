#pragma once
// Opens an engine directory: engine.json is parsed and validated (validate.h), weights.bin is mapped, and, when asked,
// every segment's checksum is computed. After this the manifest can be believed: indices, offsets and sizes need no
// further checks.

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
  Path dir;
};

// done and total in bytes of weights.bin; called between parts of a segment, from the calling thread. May be empty.
using LoadProgress = std::function<void(int64_t done_bytes, int64_t total_bytes)>;

// Errors (kBadInput): not an engine directory, engine.json broken or of a newer format, weights.bin of another size, a
// checksum that does not match (names the segment).
Result<LoadedArtifact> open_artifact(const Path& dir, bool verify_checksums, const LoadProgress& progress = {});

// Parts of weights.bin. The tensor's elements: all experts, padding included; scales float [E][n_pad] and column sums
// int32 [E][n_pad] of a kPackedI8 tensor (nullptr for other packings).
inline const std::byte* view_weight(const LoadedArtifact& a, const WeightTensor& w) {
  return a.weights.bytes().data() + w.offset;
}
inline const float* view_scales(const LoadedArtifact& a, const WeightTensor& w) {
  return w.packing == Packing::kPackedI8 ? reinterpret_cast<const float*>(a.weights.bytes().data() + w.scale_offset)
                                         : nullptr;
}
inline const int32_t* view_colsums(const LoadedArtifact& a, const WeightTensor& w) {
  return w.packing == Packing::kPackedI8 ? reinterpret_cast<const int32_t*>(a.weights.bytes().data() + w.colsum_offset)
                                         : nullptr;
}

}  // namespace mi::artifact
