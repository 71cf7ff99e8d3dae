#pragma once
// The quantization recipe: the YAML file of `metainfer quantize --config`. Every key is known by name; an unknown one
// is refused with the nearest known one.
//
//   quant:
//     weight_bits: 8                 # 8 (W8A8) | 4 (W4A8)
//     activation_bits: 8             # 8
//     weight_scheme: per_channel     # per_channel | per_tensor with 8 bits; per_group with 4 bits
//     group_size: 128                # 32 | 64 | 128, with 4 bits only: consecutive inputs that share a scale
//     rounding: auto                 # nearest | gptq (errors are spread over the columns left, from calibration) |
//                                    # auto: gptq for int4, nearest for int8 | none: smooths, and leaves the model in
//                                    # float, to see that it says the same
//     gptq: {damping: 0.01, tokens: 8192}   # of the mean diagonal; calibration tokens whose rows are kept per layer
//     coverage: {min_tokens: 8, force: false}  # experts that calibration reaches less often are named; force: they
//                                    # are shown 256 tokens that were not routed to them. Else what they need falls back
//                                    # to nothing learnt: no smoothing, rounding to nearest
//     activation_scheme: per_token   # per_token (scale at run time) | per_tensor (one scale from calibration) | auto
//                                    # (per_tensor, and per_token where bound asks for it)
//     activations: {"re:.*down": per_token}  # the same for the inputs of single matrices; the last word. Matrices that
//                                    # share an input share its scale: per_token if one of them asks for it
//     saturation: {percentile: 99.9, layers: ["re:.*down"]}   # the inputs of these matrices have a scale per token that
//                                    # never exceeds what the percentile of |x| over calibration asks for: a token's
//                                    # outliers are cut instead of taking the others' precision. Wins over activations.
//                                    # layers: auto: the inputs whose layers have a smaller error with it
//     observer: minmax               # where a per_tensor scale ends: minmax | percentile | mse (least squared error)
//     percentile: 99.9               # of |x|, with observer: percentile
//     calibration_data: file.jsonl   # text, jsonl with "text", "messages" or "ids"; relative to the YAML. Default:
//                                    # built in
//     calibration_samples: 512
//     calibration_length: 256        # tokens per sample
//     smooth_quant: {enable: true, alpha: 0.6}   # alpha: search tries 0.4 to 0.8 per layer and keeps the best;
//                                    # layers: {"3": 0.7} sets single ones; down: true smooths the inputs of down too,
//                                    # folded into up (per expert), where the activation allows it
//     sensitive_layers: []           # kept in float: module names ("layers.3.moe.experts.down", a prefix at a dot
//                                    # counts) or "re:" patterns matched from the start of the name
//                                    # auto: the fewest that keep the others within bound
//     bound: 0.01                    # of the autos: mean KL divergence against the float model that they may add
//     layers: {lm_head: int8}        # float | int8 | int4 (of group_size) | int4_g32 | int4_g64 | int4_g128 for the same kind of names; a later entry wins over an
//                                    # earlier one and over sensitive_layers. Reaches head and router too

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/result.h"

namespace mi::quant {

enum class WeightScheme : uint8_t { kPerChannel, kPerTensor, kPerGroup };
enum class ActivationScheme : uint8_t { kPerToken, kPerTensor, kAuto };  // kAuto: as a default only
enum class LayerFormat : uint8_t { kFloat, kInt8, kInt4, kInt4G32, kInt4G64, kInt4G128 };
const char* layer_format_name(LayerFormat f);  // "float", "int8", "int4", "int4_g32" ...
enum class Rounding : uint8_t { kAuto, kNearest, kGptq, kNone };
enum class Observer : uint8_t { kMinMax, kPercentile, kMse };
const char* name_of(Rounding r);
const char* name_of(Observer o);
const char* name_of(ActivationScheme a);

struct QuantConfig {
  int64_t weight_bits = 8;
  WeightScheme weights = WeightScheme::kPerChannel;  // kPerGroup exactly with 4 bits
  int64_t group_size = 128;
  ActivationScheme activations = ActivationScheme::kPerToken;
  std::string calibration_data;  // absolute or relative to the working directory once parsed; "": built in
  int64_t calibration_samples = 512;
  int64_t calibration_length = 256;
  Rounding rounding = Rounding::kAuto;
  double gptq_damping = 0.01;
  int64_t gptq_tokens = 8192;
  int64_t min_expert_tokens = 8;
  bool force_experts = false;
  Observer observer = Observer::kMinMax;
  double percentile = 99.9;
  std::vector<std::pair<std::string, ActivationScheme>> activation_layers;  // in the file's order
  double saturation_percentile = 99.9;
  std::vector<std::string> saturated_layers;
  bool saturation_auto = false;
  bool smooth = true;
  double smooth_alpha = 0.6;
  bool search_alpha = false;
  std::map<int32_t, double> layer_alpha;
  bool smooth_down = false;
  std::vector<std::string> sensitive_layers;
  bool sensitive_auto = false;
  double bound = 0.01;
  std::vector<std::pair<std::string, LayerFormat>> layers;  // in the file's order
  std::string source;              // the file, for messages; "": made in memory
  std::vector<std::string> notes;  // what of the file has no effect
  std::string key(const char* name) const { return source.empty() ? name : source + ": " + name; }
};

Result<QuantConfig> parse_quant_config(std::string_view yaml, const std::string& what);
Result<QuantConfig> load_quant_config(const Path& file);

}  // namespace mi::quant
