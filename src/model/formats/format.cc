#include "model/formats/format.h"

#include <fmt/format.h>

#include "model/formats/gguf_blocks.h"

namespace mi::model::formats {

std::string Format::text() const {
  std::string s;
  switch (layout) {
    case Layout::kInt8:
      s = "int8";
      break;
    case Layout::kFloat8:
      s = "fp8";
      break;
    case Layout::kPackedInt:
      s = fmt::format("packed int{}", bits);
      break;
    case Layout::kNvFp4:
    case Layout::kNvFp4ModelOpt:
      return "nvfp4";
    case Layout::kMxFp4:
    case Layout::kMxFp4Blocks:
      return "mxfp4";
    case Layout::kGptq:
      s = fmt::format("gptq int{}", bits);
      break;
    case Layout::kAwq:
      s = "awq int4";
      break;
    case Layout::kGguf:
      return fmt::format("gguf {}", find_gguf_block(gguf_type)->name);
  }
  switch (strategy) {
    case Strategy::kTensor:
      return s + " per tensor";
    case Strategy::kChannel:
      return s + " per channel";
    case Strategy::kGroup:
      return group > 0 ? fmt::format("{} in groups of {}", s, group) : s;
    case Strategy::kBlock:
      return fmt::format("{} in blocks of {} x {}", s, block_rows, block_cols);
  }
  return s;
}

const std::vector<Known>& known_formats() {
  static const std::vector<Known> kKnown = {
      {"compressed-tensors", "int-quantized"},
      {"compressed-tensors", "naive-quantized"},
      {"compressed-tensors", "float-quantized"},
      {"compressed-tensors", "pack-quantized"},
      {"compressed-tensors", "mxfp8-quantized"},
      {"compressed-tensors", "mxfp4-pack-quantized"},
      {"compressed-tensors", "nvfp4-pack-quantized"},
      {"compressed-tensors", "mixed-precision"},
      {"modelopt", "NVFP4"},
      {"modelopt", "FP8"},
      {"fp8", ""},
      {"mxfp8", ""},
      {"mxfp4", ""},
      {"gptq", ""},
      {"awq", ""},
  };
  return kKnown;
}

std::string known_formats_text() {
  std::string s, method;
  for (const Known& k : known_formats()) {
    if (k.method != method)
      s += (s.empty() ? "" : "; ") + std::string(k.method);
    else
      s += ",";
    method = k.method;
    if (*k.format) s += fmt::format(" {}", k.format);
  }
  return s;
}

}  // namespace mi::model::formats
