#pragma once
// The header of a GGUF file, read only as far as needed to refuse a broken one: magic, version, counts against the
// file's size before anything is allocated, string lengths, array lengths, tensor types and ranges. Importing GGUF is
// not done yet.

#include <cstdint>
#include <string>

#include "base/file.h"
#include "base/result.h"

namespace mi::model {

struct GgufSummary {
  uint32_t version = 0;
  uint64_t tensors = 0, keys = 0;
  std::string architecture;  // general.architecture
};

Result<GgufSummary> check_gguf(const Path& file);
// The same on bytes, for fuzzing; `what` names the source.
Result<GgufSummary> check_gguf_bytes(std::span<const std::byte> bytes, const std::string& what);

}  // namespace mi::model
