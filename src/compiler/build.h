#pragma once
// MIR directory -> engine directory: passes, lowering, memory plan, packing, reports. The output appears whole or not
// at all.

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "artifact/types.h"
#include "base/file.h"
#include "base/json.h"
#include "base/result.h"
#include "compiler/conversions.h"
#include "compiler/expert_groups.h"
#include "compiler/expert_order.h"
#include "compiler/kernel_fallbacks.h"
#include "ir/mir_dir.h"
#include "ir/pipeline.h"

namespace mi::compiler {

struct BuildOptions {
  Path model, output;
  std::string target = "cpu";
  int opt_level = 2;                         // 0: the graph as it is; 1, 2: fused
  std::string precision;                     // of float matrices: "" as the model has them, "fp32", "bf16"
  std::vector<std::string> disabled_passes;  // by name; unknown names are refused
  const std::vector<ir::Pass>* passes = nullptr;  // as ir::PipelineOptions::list
  ir::FusionRules rules;
  bool debug_shapes = false;                 // BuildReport::shapes
  std::vector<ExpertGroups> expert_groups;
  Path expert_profile;                       // of recorded choices (artifact/expert_profile.h): experts are stored by it, where that pays
  ReplayOrder replay_order;                  // measures what it was worth; may be empty
  std::map<std::string, std::string> recorded;  // further entries of the manifest's options: what a config file said
  bool force = false;                        // replace an existing engine
  std::string appendix;                      // HTML that ends report.html: what others found out about this model
  bool scratch = false;                      // an engine for a moment: no progress line, no report, not synced to disk
  bool strict = false;                       // fail when an op is outside the int8 path of a W8A8 model
  std::vector<std::string> allowed_fallbacks;  // strict: but for these; a weight's name in its layer, * and ? stand for others
  // The KV plan that is printed: tokens per sequence (0: 4096, or what the model allows if that is less) and sequences.
  int64_t plan_seq_len = 0;
  int64_t plan_batch = 32;
};

struct BuildReport {
  artifact::Manifest manifest;
  std::vector<int64_t> kernel_calls;  // of one step: without passes, then after each of manifest.passes; none for scratch
  std::vector<Conversion> conversions;
  KernelFallbacks kernel_fallbacks;  // on this machine, so no part of the engine
  std::optional<ExpertOrder> expert_order;  // with BuildOptions::expert_profile
  std::string shapes;  // debug_shapes: every intermediate before the first pass and after each that changed something
  int64_t source_bytes = 0;  // of the model's weights
  int64_t engine_bytes = 0;  // of the whole directory
  int64_t unshared_activation_bytes = 0,
          peak_activation_bytes = 0;  // per token: without sharing; the least any plan needs
  int64_t plan_seq_len = 0, plan_batch = 0;
  double seconds = 0;
};

// Errors: kUsage for options that make no sense, kBadInput for the model, kEnvironment for lack of space, kCheckFailed
// for strict with fallbacks (names each).
Result<BuildReport> build_engine(const BuildOptions& o);
// Of a model that is open, whole or a piece; o.model is not read.
Result<BuildReport> build_engine(const ir::MirDir& mir, const BuildOptions& o);

// The targets that build_engine accepts.
const std::vector<std::string>& targets();

// For people and for machines.
std::string report_text(const BuildReport& r);
Json report_json(const BuildReport& r);
// A page on its own, no scripts and nothing loaded: written as report.html into the engine.
std::string report_html(const BuildReport& r, const ir::Graph& after_passes, const std::string& appendix = {});

}  // namespace mi::compiler
