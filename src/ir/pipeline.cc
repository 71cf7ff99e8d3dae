#include "ir/pipeline.h"

#include <algorithm>
#include <chrono>

#include "base/json.h"
#include "ir/passes/rewrite.h"
#include "ir/stats.h"
#include "ir/verify.h"

namespace mi::ir {
const std::vector<Pass>& passes() {
  // fuse_residual before group_experts: the residual of expert_combine goes along into the grouped node.
  static const std::vector<Pass> list = {
      {"fuse_qkv", "projections of attention that read the same value become one matrix product", 1, fuse_qkv},
      {"fuse_gate_up", "gate and up of dense and shared MLPs become one matrix product", 1, fuse_gate_up},
      {"fuse_norm_quantize", "a norm writes the int8 form of its result itself", 1, fuse_norm_quantize},
      {"fuse_residual",
       "scale and residual addition move into the epilogue of the matrix product or the expert combination", 1,
       fuse_residual},
      {"group_experts", "the chain of routed experts becomes one grouped kernel", 1, group_experts},
      {"dead_code", "nodes whose results nobody reads are dropped", 1, dead_code},
  };
  return list;
}

Result<std::vector<PassRun>> run_pipeline(Graph& g, const PipelineOptions& o) {
  const std::vector<Pass>& list = o.list ? *o.list : passes();
  std::vector<std::string> names;
  for (const Pass& p : list) names.emplace_back(p.name);
  for (const std::string& d : o.disabled) {
    if (std::find(names.begin(), names.end(), d) != names.end()) continue;
    const std::string near = nearest_name(d, names);
    return fail(ErrorCode::kUsage, "there is no pass '{}'{}; the passes are {}", d,
                near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near), fmt::join(names, ", "));
  }
  if (auto s = verify(g); !s.ok()) return s.error().with_context("the graph is illegal before the first pass");

  std::vector<PassRun> runs;
  for (const Pass& p : list) {
    PassRun run;
    run.name = p.name;
    run.nodes_before = run.nodes_after = count_nodes(g);
    run.skipped =
        o.opt_level < p.min_opt_level || std::find(o.disabled.begin(), o.disabled.end(), p.name) != o.disabled.end();
    if (!run.skipped) {
      const auto start = std::chrono::steady_clock::now();
      run.changed = p.run(g.prologue);
      for (Block& b : g.blocks) run.changed = p.run(b) || run.changed;
      run.changed = p.run(g.epilogue) || run.changed;
      run.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      run.nodes_after = count_nodes(g);
      if (auto s = verify(g); !s.ok())
        return fail(ErrorCode::kCheckFailed,
                    "pass {} left an illegal graph: {}; this is a bug, --disable-pass={} goes around it", p.name,
                    s.error().message(), p.name);
    }
    if (o.after_each) o.after_each(run, g);
    runs.push_back(std::move(run));
  }
  return runs;
}

}  // namespace mi::ir
