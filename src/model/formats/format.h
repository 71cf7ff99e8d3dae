#pragma once
// How the matrices of a module are stored, as plain data: what quantization_config says, whichever tool wrote it.

#include <cstdint>
#include <string>
#include <vector>

namespace mi::model::formats {

enum class Layout : uint8_t {
  kInt8,           // scaled_codes.h; of compressed-tensors
  kFloat8,         // scaled_codes.h; any tool
  kPackedInt,      // packed_int.h
  kNvFp4,          // fp4.h, compressed-tensors: `weight_packed`, divided by a global scale
  kNvFp4ModelOpt,  // fp4.h, ModelOpt: `weight`, multiplied by weight_scale_2
  kMxFp4,          // fp4.h, compressed-tensors: `weight_packed`
  kMxFp4Blocks,    // fp4.h, gpt-oss: NAME_blocks, NAME_scales
  kGptq,           // gptq.h
  kAwq,            // awq.h
  kGguf,           // gguf_blocks.h
};

// What one scale covers.
enum class Strategy : uint8_t { kTensor, kChannel, kGroup, kBlock };

struct Format {
  Layout layout = Layout::kInt8;
  int bits = 8;
  Strategy strategy = Strategy::kChannel;
  int64_t group = 0;                       // inputs of kGroup; 0 with GPTQ and AWQ: all of them
  int64_t block_rows = 0, block_cols = 0;  // of kBlock
  uint32_t gguf_type = 0;                  // of kGguf
  bool symmetric = true;
  bool group_index = false;       // `weight_g_idx` or `g_idx` has to be there
  bool zero_minus_one = false;    // GPTQ version 1
  bool int8_activations = false;  // the model was made for int8 activations, symmetric or not, dynamic or static
  bool static_activations = false, asymmetric_activations = false;
  // "compressed-tensors int4 in groups of 32"
  std::string text() const;
};

// One row for each format that checkpoints are taken in: the register that config parsing, messages and documentation
// share.
struct Known {
  const char* method;  // quantization_config.quant_method
  const char* format;  // compressed-tensors: format; ModelOpt: quant_algo; else ""
};
const std::vector<Known>& known_formats();
// "compressed-tensors int-quantized, ..., gptq, awq"
std::string known_formats_text();

}  // namespace mi::model::formats
