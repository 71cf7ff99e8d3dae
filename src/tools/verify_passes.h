#pragma once
// Does every pass of the compiler leave what the model says as it is? A model is built without passes, then with one
// pass more each time, then with all but one, and every engine runs the same texts. Each is compared with the one before
// it (those without one pass: with all passes), so that a pass that breaks something is named with the first layer and
// token where it shows.
//
// No pass changes the order in which a result's terms are added (docs/architecture.md, "Numbers"), so equal bits are
// what is expected of every engine. Of a float engine a difference is forgiven within what another order could cause:
// reassociating a sum of k products moves it by at most about k * 2^-24 of the sum of their magnitudes (Higham, Accuracy
// and Stability of Numerical Algorithms, 3.1), taken once for each layer and once for the head. One that rounds
// activations has no such bound, as a last bit can move a value to the next step: it has to be equal.

#include <string>
#include <vector>

#include "base/file.h"
#include "base/json.h"
#include "base/result.h"
#include "ir/pipeline.h"

namespace mi::tools {

struct PassesOptions {
  Path model;               // MIR
  Path data;                // text or .jsonl; empty: built in
  std::string precision;    // as compiler::BuildOptions
  std::string kv_type;      // "": the engine's default
  std::string attention_order = "auto";  // exec::LoadOptions::attention_order
  int threads = 0;          // 0: hw::advise_threads()
  int64_t samples = 2, length = 128;  // texts and their tokens
  double least_same = 0.95;           // of the best next tokens, less is an alarm even within the bound
  const std::vector<ir::Pass>* passes = nullptr;  // as ir::PipelineOptions::list
  ir::FusionRules rules;
};

struct PassCheck {
  std::string what;      // "no passes", "fuse_qkv", "all but fuse_qkv"
  bool idle = false;     // the pass found nothing to do here: the graph, and so the engine, is the one before
  int64_t nodes = 0, instructions = 0;
  double max_logit_difference = 0, bound = 0;
  double same_tokens = 1;            // share of the positions whose best next token is the same
  int64_t first_layer = -2, first_token = -1;  // where the residual stream first differs; -2: nowhere; layers: the head
  std::string where;                 // the same in words; empty: nowhere
  bool ok = true;
};

struct PassesReport {
  std::vector<PassCheck> rows;
  std::string texts;    // what was run
  int64_t tokens = 0;
  std::string culprit;  // the first pass that is not ok; empty: none
  bool ok() const { return culprit.empty(); }
};

Result<PassesReport> verify_passes(const PassesOptions& o);

std::string passes_text(const PassesReport& r);
Json passes_json(const PassesReport& r);
// A heading and a table, for the engine's report.
std::string passes_html(const PassesReport& r);

}  // namespace mi::tools
