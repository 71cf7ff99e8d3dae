#pragma once
// The list of passes and the one function that runs each: switched off by name? time it; run it; verify the graph.

#include <functional>
#include <string>
#include <vector>

#include "base/result.h"
#include "ir/graph.h"

namespace mi::ir {

// What passes may fuse.
struct FusionRules {
  // Matrices of one product have one format. false: float matrices of different types may be stacked; they are stored in the
  // widest. Never matrices of int8 and int4 or float, which no kernel multiplies together. Three rules cross precisions by
  // design, each bit for bit what its single ops give: a norm or activation with the quantize that reads it, a product with
  // its float residual, and experts whose down matrix has another format.
  bool same_precision_only = true;
  // Asked with the full name of each weight ("layers.3.attn.q.weight") and result ("layers.3.qkv"): true leaves the op that
  // reads or makes it alone. Empty: none. Attention that reads a selection, and
  // the op that selects, no pass fuses anyhow.
  std::function<bool(const std::string& name)> ignores;
};

struct Pass {
  std::string_view name;  // "fuse_qkv"
  std::string_view what;  // one sentence for help and reports
  int min_opt_level;      // runs at this level and above
  bool (*run)(Block&, const FusionRules&);  // true when something changed; called for every block
};

const std::vector<Pass>& passes();  // in order

struct PassRun {
  std::string name;
  bool skipped = false;  // disabled or below its level
  bool changed = false;
  double seconds = 0;
  int64_t nodes_before = 0, nodes_after = 0;  // nodes summed over layers (a block of 57 layers counts 57 times)
};

struct PipelineOptions {
  int opt_level = 2;
  std::vector<std::string> disabled;                             // unknown names are refused
  FusionRules rules;
  const std::vector<Pass>* list = nullptr;                       // instead of passes(), for tests of what checks them
  std::function<void(const PassRun&, const Graph&)> after_each;  // debug dumps, may be empty
};

Result<std::vector<PassRun>> run_pipeline(Graph& g, const PipelineOptions& o);

}  // namespace mi::ir
