#pragma once
// A MIR as a checkpoint folder for Hugging Face transformers, vLLM and others: config.json, safetensors, tokenizer.
// Plain: float weights under the names of released checkpoints. compressed-tensors: int8 weights as int-quantized (the
// activations int8 per token, dynamic), int4 weights as pack-quantized (W4A16: consumers keep activations in float).
// The folder appears whole or not at all; metainfer.json in it says what made it.

#include <optional>

#include "tools/convert.h"
#include "tools/hf/plan.h"

namespace mi::tools {

struct CheckpointOptions {
  Path model;   // MIR directory
  Path output;  // new folder
  hf::Form form = hf::Form::kPlain;
  std::optional<DType> dtype;  // of float weights; nullopt: as the MIR has them
  uint64_t shard_bytes = uint64_t(4) << 30;
  bool force = false;
};

Result<ConvertReport> convert_to_checkpoint(const CheckpointOptions& o);

}  // namespace mi::tools
