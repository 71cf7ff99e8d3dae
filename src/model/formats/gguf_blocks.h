#pragma once
// The block types of GGUF tensors: a row is a whole number of blocks, each with its scales inside. The layouts are
// those of ggml's block_* structs and dequantize_row_* functions (github.com/ggml-org/llama.cpp,
// ggml/src/ggml-quants.c). In the types of 32 numbers the low nibbles are the first 16, the high ones the last 16,
// MXFP4 included, unlike in safetensors.

#include <cstddef>
#include <cstdint>
#include <string>

namespace mi::model::formats {

struct GgufBlock {
  uint32_t type;  // ggml's number
  const char* name;
  int64_t values;  // of a block
  int64_t bytes;
};

// nullptr for a number that is not known.
const GgufBlock* find_gguf_block(uint32_t type);
bool can_read_gguf(uint32_t type);
std::string readable_gguf_types();  // "F32, F16, ..."

struct GgufRows {
  uint32_t type = 0;                // precondition: can_read_gguf
  const std::byte* data = nullptr;  // rows behind each other
  int64_t rows = 0, cols = 0;       // cols: a multiple of the block
};

void dequantize_rows(const GgufRows& m, int64_t first, int64_t n, float* out);

}  // namespace mi::model::formats
