#pragma once
// The quantization recipe: the YAML file of `metainfer quantize --config`. Every key is known by name; an unknown one
// is refused with the nearest known one.
//
//   quant:
//     weight_bits: 8                 # 8 (W8A8) | 4 (W4A8)
//     activation_bits: 8             # 8
//     weight_scheme: per_channel     # per_channel | per_tensor with 8 bits; per_group with 4 bits
//     group_size: 128                # 32 | 64 | 128, with 4 bits only: consecutive inputs that share a scale
//     activation_scheme: per_token   # per_token (scale at run time) | per_tensor (one scale from calibration)
//     calibration_data: file.jsonl   # text, jsonl with "text", "messages" or "ids"; relative to the YAML. Default:
//                                    # built in
//     calibration_samples: 512
//     calibration_length: 256        # tokens per sample
//     smooth_quant: {enable: true, alpha: 0.6}
//     sensitive_layers: []           # kept in float: module names ("layers.3.moe.experts.down", a prefix at a dot
//                                    # counts) or "re:" patterns matched from the start of the name
//     layers: {lm_head: int8}        # float | int8 | int4 for the same kind of names; a later entry wins over an
//                                    # earlier one and over sensitive_layers. Reaches head and router too

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/result.h"

namespace mi::quant {

enum class WeightScheme : uint8_t { kPerChannel, kPerTensor, kPerGroup };
enum class ActivationScheme : uint8_t { kPerToken, kPerTensor };
enum class LayerFormat : uint8_t { kFloat, kInt8, kInt4 };
const char* layer_format_name(LayerFormat f);  // "float", "int8", "int4"

struct QuantConfig {
  int64_t weight_bits = 8;
  WeightScheme weights = WeightScheme::kPerChannel;  // kPerGroup exactly with 4 bits
  int64_t group_size = 128;
  ActivationScheme activations = ActivationScheme::kPerToken;
  std::string calibration_data;  // absolute or relative to the working directory once parsed; "": built in
  int64_t calibration_samples = 512;
  int64_t calibration_length = 256;
  bool smooth = true;
  double smooth_alpha = 0.6;
  std::vector<std::string> sensitive_layers;
  std::vector<std::pair<std::string, LayerFormat>> layers;  // in the file's order
};

Result<QuantConfig> parse_quant_config(std::string_view yaml, const std::string& what);
Result<QuantConfig> load_quant_config(const Path& file);

}  // namespace mi::quant
