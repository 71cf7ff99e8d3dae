#pragma once
// The list of passes and the one function that runs each: switched off by name? time it; run it; verify the graph.

#include <functional>
#include <string>
#include <vector>

#include "base/result.h"
#include "ir/graph.h"

namespace mi::ir {

struct Pass {
  std::string_view name;  // "fuse_qkv"
  std::string_view what;  // one sentence for help and reports
  int min_opt_level;      // runs at this level and above
  bool (*run)(Block&);    // true when something changed; called for every block
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
  const std::vector<Pass>* list = nullptr;                       // instead of passes(), for tests of what checks them
  std::function<void(const PassRun&, const Graph&)> after_each;  // debug dumps, may be empty
};

Result<std::vector<PassRun>> run_pipeline(Graph& g, const PipelineOptions& o);

}  // namespace mi::ir
