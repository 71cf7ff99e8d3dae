#pragma once
// The header of a GGUF file (ggml-org/ggml, docs/gguf.md), versions 2 and 3: keys with values, and where each tensor
// lies. Nothing in it is believed: magic, version, counts against the file's size before anything is allocated, string
// and array lengths, tensor types, shapes and ranges.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/json.h"
#include "base/result.h"
#include "tensor/tensor_view.h"

namespace mi::model {

struct GgufHeader {
  struct Tensor {
    std::string name;
    uint32_t type = 0;              // formats/gguf_blocks.h
    Shape shape;                    // outermost first, as everywhere here; the file has them innermost first
    uint64_t begin = 0, bytes = 0;  // in the file
  };
  uint32_t version = 0;
  std::map<std::string, Json, std::less<>> keys;  // text that is no UTF-8 is kept as it is
  std::vector<Tensor> tensors;
  // keys["general.architecture"], "" where it is no text.
  std::string architecture() const;
};

Result<GgufHeader> read_gguf(const Path& file);
// The same on bytes; `what` names the source.
Result<GgufHeader> read_gguf_bytes(std::span<const std::byte> bytes, const std::string& what);

}  // namespace mi::model
