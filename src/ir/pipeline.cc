#include "ir/pipeline.h"

#include <algorithm>
#include <chrono>

#include "base/json.h"
#include "ir/edit.h"
#include "ir/passes/rewrite.h"
#include "ir/stats.h"
#include "ir/verify.h"

namespace mi::ir {
const std::vector<Pass>& passes() {
  // fuse_residual before group_experts: the residual of expert_combine goes along into the grouped node.
  // fuse_activation_quantize after it: the activation and quantize of experts belong to the grouped node.
  static const std::vector<Pass> list = {
      {"fold_constants", "factors that are known at build time are not multiplied in every step", 1, fold_constants},
      {"fuse_qkv", "projections of attention that read the same value become one matrix product", 1, fuse_qkv},
      {"fuse_gate_up", "gate and up of dense and shared MLPs become one matrix product", 1, fuse_gate_up},
      {"fuse_norm_quantize", "a norm writes the int8 form of its result itself", 1, fuse_norm_quantize},
      {"fuse_rope_append", "keys are rotated on their way into the cache", 1, fuse_rope_append},
      {"fuse_residual",
       "scale and residual addition move into the epilogue of the matrix product or the expert combination", 1,
       fuse_residual},
      {"group_experts", "the chain of routed experts becomes one grouped kernel", 1, group_experts},
      {"fuse_activation_quantize", "an activation writes the int8 form of its result itself", 1, fuse_activation_quantize},
      {"dead_code", "nodes whose results nobody reads are dropped", 1, dead_code},
      // Not of the graph: the compiler does it when it plans memory. Here to be listed, switched off and checked like the others.
      {"share_buffers", "activations that are not alive together share memory", 0, nullptr},
  };
  return list;
}

namespace {

// Layers whose pinned nodes differ get blocks of their own.
void pin(Graph& g, const std::function<bool(const std::string&)>& ignores) {
  const auto pinned = [&](const Block& b, const Node& n, int32_t layer) {
    const auto named = [&](const std::string& name) { return ignores(full_name(name, layer)); };
    for (const WeightUse& u : n.weights)
      for (int32_t w : u.weights)
        if (named(b.weights[size_t(w)].name)) return true;
    return std::any_of(n.out.begin(), n.out.end(), [&](ValueId v) { return named(b.values[size_t(v)].name); });
  };
  split_layers(g, [&](const Block& b, int32_t layer) {
    std::string key;
    for (const Node& n : b.nodes) key += pinned(b, n, layer) ? '1' : '0';
    return key;
  });
  const auto mark = [&](Block& b, int32_t layer) {
    for (Node& n : b.nodes) n.pinned = pinned(b, n, layer);
  };
  mark(g.prologue, -1);
  for (Block& b : g.blocks) mark(b, b.layers.at(0));
  mark(g.epilogue, -1);
}

}  // namespace

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

  if (o.rules.ignores) pin(g, o.rules.ignores);
  std::vector<PassRun> runs;
  for (const Pass& p : list) {
    PassRun run;
    run.name = p.name;
    run.nodes_before = run.nodes_after = count_nodes(g);
    run.skipped =
        o.opt_level < p.min_opt_level || std::find(o.disabled.begin(), o.disabled.end(), p.name) != o.disabled.end();
    if (!run.skipped && p.run) {
      const auto start = std::chrono::steady_clock::now();
      run.changed = p.run(g.prologue, o.rules);
      for (Block& b : g.blocks) run.changed = p.run(b, o.rules) || run.changed;
      run.changed = p.run(g.epilogue, o.rules) || run.changed;
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
  // A pin is for this run alone.
  const auto unpin = [](Block& b) {
    for (Node& n : b.nodes) n.pinned = false;
  };
  unpin(g.prologue);
  for (Block& b : g.blocks) unpin(b);
  unpin(g.epilogue);
  return runs;
}

}  // namespace mi::ir
