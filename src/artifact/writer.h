#pragma once
// Writes an engine directory: weights.bin tensor by tensor in bounded memory, checksummed per segment while it streams,
// then engine.json, last, so that a directory with an engine.json is whole. The directory itself should be an
// OutputDir.

#include <memory>
#include <span>

#include "artifact/types.h"
#include "base/file.h"
#include "base/result.h"

namespace mi::artifact {

class ArtifactWriter {
 public:
  // segment_bytes: a segment ends at the first tensor border after this many bytes (a larger tensor makes a larger
  // segment).
  static Result<ArtifactWriter> create(const Path& dir, int64_t segment_bytes = kSegmentBytes);
  ArtifactWriter(ArtifactWriter&&) noexcept;
  ~ArtifactWriter();

  // Starts a part of weights.bin (a tensor's elements with its scales and column sums; never split between segments) of
  // about `bytes` bytes. A new segment begins here when the current one is full.
  Status begin_tensor(int64_t bytes);
  // Pads to 64 bytes and returns the offset where the next write goes.
  Result<int64_t> align();
  Status write(std::span<const std::byte> bytes);
  int64_t offset() const;

  // Ends weights.bin. Fills manifest.segments and memory.weight_bytes, validates the whole and writes engine.json.
  Status finish(Manifest& manifest, Keep keep = Keep::kSafe);

 private:
  struct Impl;
  explicit ArtifactWriter(std::unique_ptr<Impl> i);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mi::artifact
