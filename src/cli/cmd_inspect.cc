#include <fmt/format.h>

#include <algorithm>

#include "artifact/reader.h"
#include "base/json.h"
#include "base/util.h"
#include "cli/command.h"
#include "ir/mir_dir.h"
#include "ir/text.h"

namespace mi::cli {
namespace {

struct Flags {
  std::string dir;
  bool graph = false;
};

// Stored scales of activations: static ones, and those at which scales per token saturate.
struct StoredScales {
  int64_t fixed = 0, saturating = 0;
  template <class Weights>
  void count(const Weights& weights, const OpParams& p, int64_t times) {
    if (std::none_of(weights.begin(), weights.end(), [](const auto& w) { return w.role == Role::kInScale; })) return;
    const auto* q = std::get_if<QuantizeParams>(&p);
    const auto* g = std::get_if<GroupedExpertsParams>(&p);
    ((q && q->saturate) || (g && g->saturate) ? saturating : fixed) += times;
  }
  void show() const {
    if (fixed > 0) fmt::print("scales        {} static ones of activations\n", fixed);
    if (saturating > 0) fmt::print("scales        {} inputs with scales per token that saturate\n", saturating);
  }
};

int inspect_mir(const ir::MirDir& m, bool graph) {
  const ir::ModelInfo& i = m.graph.info;
  fmt::print("MIR           {} ({}, recipe {})\n", i.name, i.model_type, i.family);
  fmt::print("shape         {} layers, hidden {}, vocabulary {}, {} positions\n", i.layers, i.hidden, i.vocab,
             i.max_positions);
  std::map<std::string, std::pair<int64_t, int64_t>> by_dtype;  // tensors, bytes
  for (const auto& d : ir::declared_tensors(m.graph)) {
    auto& [count, bytes] = by_dtype[std::string(dtype_name(d.dtype))];
    ++count;
    bytes += shape_count(d.shape).value_or(0) * int64_t(dtype_bytes(d.dtype));
  }
  for (const auto& [name, v] : by_dtype)
    fmt::print("{:<13} {} tensors, {}\n", name, v.first, human_bytes(double(v.second)));
  StoredScales scales;
  for (const ir::Block& b : m.graph.blocks)
    for (const ir::Node& n : b.nodes) scales.count(n.weights, n.params, int64_t(b.layers.size()));
  scales.show();
  for (const ir::Block& b : m.graph.blocks)
    fmt::print("block         {}: {} layer{}, {} ops each\n", b.name, b.layers.size(), b.layers.size() == 1 ? "" : "s",
               b.nodes.size());
  if (graph) fmt::print("\n{}", ir::print(m.graph));
  return 0;
}

int inspect_engine(const artifact::Manifest& m, const Path& dir, bool graph) {
  fmt::print("engine        {} ({}), format {}, built by metainfer {}\n", m.model.name, m.model.model_type,
             m.format_version, m.tool_version);
  fmt::print("shape         {} layers, hidden {}, vocabulary {}, {} positions\n", m.model.layers, m.model.hidden,
             m.model.vocab, m.model.max_positions);
  fmt::print("parameters    {:.2f} million, {:.2f} million active per token, {}\n", double(m.model.total_params) / 1e6,
             double(m.model.active_params) / 1e6, m.model.precision);
  fmt::print("weights       {} in {} segment{}\n", human_bytes(double(m.memory.weight_bytes)), m.segments.size(),
             m.segments.size() == 1 ? "" : "s");
  fmt::print("KV cache      {} per token at bf16\n", human_bytes(double(m.memory.kv_bytes_per_token_bf16)));
  fmt::print("activations   {} per token of a step\n", human_bytes(double(m.memory.activation_bytes_per_token)));
  StoredScales scales;
  for (const artifact::Instr& i : m.program) scales.count(i.weights, i.params, 1);
  scales.show();
  fmt::print("program       {} instructions\n", m.program.size());
  for (const auto& p : m.passes)
    fmt::print("pass          {:<20} {}  {} -> {} ops\n", p.name, p.skipped ? "off" : "on ", p.nodes_before,
               p.nodes_after);
  for (const auto& x : m.fallbacks) fmt::print("fallback      {}: {} ({}); {}\n", x.where, x.what, x.why, x.fix);
  if (graph) {
    const auto text = read_file(dir / "graph.mir");
    if (text.ok()) fmt::print("\n{}", *text);
  }
  return 0;
}

Result<int> run(const Flags& f) {
  const Path dir = f.dir;
  if (std::filesystem::exists(dir / "engine.json")) {
    MI_TRY(const artifact::LoadedArtifact a, artifact::open_artifact(dir));
    return inspect_engine(a.manifest, dir, f.graph);
  }
  if (std::filesystem::exists(dir / "model.mir")) {
    MI_TRY(const ir::MirDir m, ir::MirDir::open(dir));
    return inspect_mir(m, f.graph);
  }
  return bad_input(
      "{}: holds neither engine.json nor model.mir; inspect reads what metainfer export, quantize or build wrote",
      f.dir);
}

}  // namespace

Command add_inspect(CLI::App& parent) {
  auto f = std::make_shared<Flags>();
  CLI::App* app = parent.add_subcommand("inspect", "show what a MIR or an engine holds");
  app->add_option("dir", f->dir, "MIR or engine directory")->required();
  app->add_flag("--graph", f->graph, "print the graph too");
  app->footer("Example:\n  metainfer inspect mini-m3-engine --graph");
  return {app, [f]() { return run(*f); }};
}

}  // namespace mi::cli
