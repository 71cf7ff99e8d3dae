#pragma once
// MIR -> quantized MIR: calibrate, smooth, round to W8A8 or W4A8, compare with the float model, report. The model is
// walked layer by layer: memory holds one layer's weights in float and rounded, the rows of the residual stream of the
// calibration tokens, and what one layer's matrices were fed.

#include <string>
#include <vector>

#include "base/file.h"
#include "base/json.h"
#include "base/result.h"
#include "hw/thread_pool.h"
#include "quant/choice.h"
#include "quant/compare.h"
#include "quant/config.h"

namespace mi::quant {

struct QuantizeOptions {
  Path model;  // a float MIR directory
  Path output;
  QuantConfig config;
  Path calibration;  // overrides config.calibration_data; empty: as configured
  bool force = false;
  bool compare = true;  // run float and rounded models side by side for the deviation table
  Path traffic;         // a sample of real prompts that the calibration set is compared with; may be empty
  Path held_out;        // ... on this text, cut like calibration text; empty: on what is always held out of the
                        // calibration text, up to 2048 tokens
  int64_t compare_tokens = 2048;  // of either, at most; 0: all of it
  int64_t keep_from = int64_t(1) << 30;    // bytes of weights from which an interrupted run is gone on with (kept.h)
  size_t shard_bytes = size_t(256) << 20;  // of a weight file: how much of it is lost at most, and a layer
};

struct QuantizeReport {
  std::string calibration_source, calibration_hash;  // "" where nothing needed calibration
  int64_t calibration_sequences = 0, calibration_tokens = 0;
  std::map<std::string, int64_t> formats;              // of quantized matrices: "w4a8_g32"; per layer, experts as one
  int64_t float_matrices = 0;                          // that the recipe kept, counted likewise
  int64_t smoothed_sites = 0, static_scales = 0, saturated = 0;
  int64_t spread_matrices = 0;                         // rounded with error compensation, experts counted one by one
  std::map<int32_t, std::map<std::string, double>> alphas;  // searched ones, by layer and value
  std::string calibration_mix, traffic_mix;            // what they are made of, in words
  std::vector<std::string> warnings;                   // of a calibration set that is one-sided
  int64_t forced_experts = 0;                          // that were fed calibration tokens beside those routed to them
  std::vector<std::string> notes;                      // skipped smoothing sites, experts with few tokens
  std::vector<Choice::Count> chosen;                   // what each pattern of the recipe matched
  std::vector<LayerDeviation> layers;                  // empty without compare
  Predictions predictions;                             // on text that calibration did not see, where there is enough
  bool held_out = false;                               // ... there was
  int64_t bytes_before = 0, bytes_after = 0;           // weights
};

Result<QuantizeReport> quantize(const QuantizeOptions& o, hw::ThreadPool& pool);

std::string report_text(const QuantizeReport& r);
Json report_json(const QuantizeReport& r);

}  // namespace mi::quant
