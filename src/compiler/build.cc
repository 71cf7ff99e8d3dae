#include "compiler/build.h"

#include <fnmatch.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "artifact/layout.h"
#include "artifact/writer.h"
#include "base/place.h"
#include "base/util.h"
#include "base/version.h"
#include "compiler/emit.h"
#include "compiler/fallbacks.h"
#include "compiler/kv_plan.h"
#include "compiler/lower.h"
#include "compiler/memory_plan.h"
#include "ir/stats.h"
#include "ir/text.h"

namespace mi::compiler {
namespace {

Status check_options(const BuildOptions& o) {
  const auto& known = targets();
  if (std::find(known.begin(), known.end(), o.target) == known.end())
    return fail(ErrorCode::kUsage, "--target {}: not a target of this program; it builds for: {}", o.target,
                fmt::join(known, ", "));
  if (o.opt_level < 0 || o.opt_level > 2)
    return fail(ErrorCode::kUsage, "--opt-level {}: expected O0, O1 or O2", o.opt_level);
  if (!o.strict && !o.allowed_fallbacks.empty())
    return fail(ErrorCode::kUsage, "--allow-fallback makes exceptions of --strict, which is not given");
  if (o.plan_seq_len < 0 || o.plan_batch < 1)
    return fail(ErrorCode::kUsage, "the planned sequence length and batch have to be positive");
  MI_TRY_VOID([&]() -> Status {
    auto p = parse_precision(o.precision);
    return p.ok() ? Status() : Status(p.error());
  }());
  return check_outside(o.model, o.output);
}

artifact::ModelFacts facts_of(const ir::Graph& g, const Program& p) {
  artifact::ModelFacts f;
  f.name = g.info.name;
  f.family = g.info.family;
  f.model_type = g.info.model_type;
  f.vocab = g.info.vocab;
  f.hidden = g.info.hidden;
  f.layers = g.info.layers;
  f.max_positions = g.info.max_positions;
  f.eos_ids = g.info.eos_ids;
  f.bos_id = g.info.bos_id;
  f.pad_id = g.info.pad_id;
  const ir::GraphStats stats = ir::stats_of(g);
  f.total_params = stats.total_params;
  f.active_params = stats.active_params;
  f.max_k = p.max_k;

  // What most matrix elements of the layers are; the head and the router do not vote.
  std::map<artifact::Packing, int64_t> elements;
  for (const artifact::Instr& in : p.instrs)
    for (const auto& w : in.weights) {
      const artifact::WeightTensor& t = p.weights[size_t(w.tensor)].tensor;
      if (in.layer >= 0 && t.packing != artifact::Packing::kPlain) elements[t.packing] += t.experts * t.n * t.k;
    }
  const auto most = std::max_element(elements.begin(), elements.end(),
                                     [](const auto& a, const auto& b) { return a.second < b.second; });
  const auto packing = most == elements.end() ? artifact::Packing::kPackedF32 : most->first;
  f.precision = packing == artifact::Packing::kPackedI8     ? "w8a8"
                : packing == artifact::Packing::kPackedI4   ? "w4a8"
                : packing == artifact::Packing::kPackedBF16 ? "bf16"
                                                            : "fp32";
  return f;
}

std::map<std::string, std::string> options_of(const BuildOptions& o) {
  std::map<std::string, std::string> all = {{"target", o.target},
                                            {"opt_level", fmt::format("O{}", o.opt_level)},
                                            {"precision", o.precision.empty() ? "keep" : o.precision},
                                            {"disabled_passes", fmt::format("{}", fmt::join(o.disabled_passes, ","))}};
  all.insert(o.recorded.begin(), o.recorded.end());
  return all;
}

// Weights of fallbacks are behind "layers 0-2: ", or stand alone in prologue and epilogue.
Status check_strict(std::vector<artifact::Fallback> found, const std::vector<artifact::Fallback>& kernels,
                    const std::vector<std::string>& allowed) {
  found.insert(found.end(), kernels.begin(), kernels.end());
  std::vector<artifact::Fallback> fallbacks;
  std::vector<bool> used(allowed.size());
  for (const artifact::Fallback& f : found) {
    const size_t colon = f.where.find(": ");
    const std::string name = colon == std::string::npos ? f.where : f.where.substr(colon + 2);
    bool ok = false;
    for (size_t i = 0; i < allowed.size(); ++i)
      if (fnmatch(allowed[i].c_str(), name.c_str(), 0) == 0) ok = used[i] = true;
    if (!ok) fallbacks.push_back(f);
  }
  for (size_t i = 0; i < allowed.size(); ++i)
    if (!used[i])
      return fail(ErrorCode::kUsage, "--allow-fallback {}: no fallback of this model has such a name{}", allowed[i],
                  found.empty() ? "; it has none" : "; without --strict they are listed");
  if (fallbacks.empty()) return {};
  std::string list;
  for (const auto& f : fallbacks) list += fmt::format("\n  {}: {}; {}; {}", f.where, f.what, f.why, f.fix);
  return fail(ErrorCode::kCheckFailed, "--strict: {} operations are outside the fast path:{}", fallbacks.size(), list);
}

Status check_space(const BuildOptions& o, int64_t planned) {
  constexpr int64_t kOtherFiles = 64 << 20;  // tokenizer, engine.json, padding of segments
  constexpr int64_t kOtherScratch = 1 << 20;
  const int64_t needed = planned + planned / 64 + (o.scratch ? kOtherScratch : kOtherFiles);
  MI_TRY(const uint64_t available, free_bytes(o.output));
  if (uint64_t(needed) <= available) return {};
  const std::string has = fmt::format("{}, the disk has {} free; free some space or choose another place", human_bytes(double(needed)),
                                      human_bytes(double(available)));
  // Who asked for a model knows of no engine.
  if (o.scratch)
    return fail(ErrorCode::kEnvironment, "{}: work on the model needs a temporary file of about {}", o.output.parent_path().parent_path().string(), has);
  return fail(ErrorCode::kEnvironment, "{}: the engine takes about {}", o.output.string(), has);
}

// Every value of each block with its type, its op and, beside a graph before, "+" where it is new; then what is gone.
std::string shapes_text(const ir::Graph& g, const ir::Graph* before) {
  std::string s;
  const auto block = [&](const ir::Block& b, const ir::Block* old) {
    if (old && *old == b) return;
    s += fmt::format("  {}{}\n", b.name, b.layers.empty() ? "" : fmt::format(" ({})", layers_text(b.layers)));
    const auto has = [](const ir::Block& x, const ir::Value& v) { return std::find(x.values.begin(), x.values.end(), v) != x.values.end(); };
    for (const ir::Node& n : b.nodes)
      for (const ir::ValueId v : n.out) {
        const ir::Value& value = b.values[size_t(v)];
        s += fmt::format("  {} {:<24} {:<16} {}\n", old && !has(*old, value) ? '+' : ' ', value.name, ir::type_text(value.type), op_name(n.op));
      }
    if (!old) return;
    for (const ir::Value& v : old->values)
      if (!has(b, v)) s += fmt::format("  - {:<24} {}\n", v.name, ir::type_text(v.type));
  };
  block(g.prologue, before ? &before->prologue : nullptr);
  for (size_t i = 0; i < g.blocks.size(); ++i)  // fusion.ignore may have split blocks before the first pass
    block(g.blocks[i], before && i < before->blocks.size() && before->blocks[i].layers == g.blocks[i].layers ? &before->blocks[i] : nullptr);
  block(g.epilogue, before ? &before->epilogue : nullptr);
  return s;
}

int64_t directory_bytes(const Path& dir) {
  int64_t sum = 0;
  std::error_code ec;
  for (const auto& e : std::filesystem::recursive_directory_iterator(dir, ec))
    if (e.is_regular_file(ec)) sum += int64_t(e.file_size(ec));
  return sum;
}

}  // namespace

const std::vector<std::string>& targets() {
  static const std::vector<std::string> kTargets = {"cpu"};
  return kTargets;
}

Result<BuildReport> build_engine(const BuildOptions& o) {
  MI_TRY_VOID(check_options(o));
  MI_TRY(const ir::MirDir mir, ir::MirDir::open(o.model));
  return build_engine(mir, o);
}

Result<BuildReport> build_engine(const ir::MirDir& mir, const BuildOptions& o) {
  const auto start = std::chrono::steady_clock::now();
  MI_TRY_VOID(check_options(o));
  MI_TRY(const FloatPrecision precision, parse_precision(o.precision));
  MI_TRY(OutputDir out, OutputDir::create(o.output, o.force));

  ir::Graph graph = mir.graph;
  ir::PipelineOptions pipeline;
  pipeline.opt_level = o.opt_level;
  pipeline.disabled = o.disabled_passes;
  pipeline.list = o.passes;
  pipeline.rules = o.rules;
  BuildReport r;
  const auto count_calls = [&](const ir::Graph& g) {
    const auto p = lower(g, precision);  // an error is told below, of the whole
    r.kernel_calls.push_back(p.ok() ? int64_t(p->instrs.size()) : 0);
  };
  if (!o.scratch) {
    count_calls(graph);
    if (o.debug_shapes) r.shapes = "shapes before the passes\n" + shapes_text(graph, nullptr);
    pipeline.after_each = [&, before = graph](const ir::PassRun& run, const ir::Graph& g) mutable {
      if (run.changed)
        count_calls(g);
      else
        r.kernel_calls.push_back(r.kernel_calls.back());
      if (!o.debug_shapes) return;
      r.shapes += fmt::format("shapes after {}{}\n", run.name, run.changed ? "" : run.skipped ? ": skipped" : ": the same");
      if (run.changed) r.shapes += shapes_text(g, &before);
      before = g;
    };
  }
  MI_TRY(const std::vector<ir::PassRun> passes, ir::run_pipeline(graph, pipeline));

  artifact::Manifest& m = r.manifest;
  m.tool_version = version();
  m.options = options_of(o);
  for (const ir::PassRun& p : passes)
    m.passes.push_back({p.name, p.skipped, p.changed, p.seconds, p.nodes_before, p.nodes_after});
  m.fallbacks = find_fallbacks(graph);
  r.conversions = find_conversions(graph);

  Program program;
  if (auto lowered = lower(graph, precision); lowered.ok())
    program = std::move(lowered).value();
  else
    return lowered.error().with_context(mir.dir.string());
  m.model = facts_of(graph, program);
  m.default_kv = m.model.precision == "fp32" ? "f32" : "bf16";
  m.caches = program.caches;
  // The last "pass": what it did is told where the others are.
  const auto sharing = std::find_if(m.passes.begin(), m.passes.end(), [](const artifact::PassReport& p) { return p.name == "share_buffers"; });
  const bool share = sharing == m.passes.end() || !sharing->skipped;
  m.memory.activation_bytes_per_token = plan_memory(program.buffers, share);
  if (sharing != m.passes.end()) sharing->changed = m.memory.activation_bytes_per_token < unshared_bytes(program.buffers);
  MI_TRY_VOID(verify_memory_plan(program.buffers, m.memory.activation_bytes_per_token));
  m.memory.kv_bytes_per_token_bf16 = artifact::kv_bytes_per_token_bf16(m.caches);
  m.buffers = std::move(program.buffers);
  m.program = std::move(program.instrs);
  for (const WeightPlan& w : program.weights) m.weights.push_back(w.tensor);  // their places are known when they are written
  MI_TRY_VOID(set_expert_groups(o.expert_groups, &m));
  std::optional<artifact::ExpertProfile> choices;
  if (!o.expert_profile.empty()) {
    MI_TRY(choices, artifact::read_expert_profile(o.expert_profile, m));
    r.expert_order = order_experts(*choices, &m);
    for (size_t i = 0; i < m.weights.size(); ++i) program.weights[i].tensor.expert_slots = m.weights[i].expert_slots;
    if (r.expert_order->reordered() > 0) m.options["expert_profile"] = fmt::format("{} tokens of {}", choices->tokens, choices->source);
  }
  if (!o.scratch) r.kernel_fallbacks = find_kernel_fallbacks(m);
  if (o.strict) MI_TRY_VOID(check_strict(m.fallbacks, r.kernel_fallbacks.list, o.allowed_fallbacks));
  r.unshared_activation_bytes = unshared_bytes(m.buffers);
  r.peak_activation_bytes = peak_bytes(m.buffers);
  r.plan_seq_len = std::min<int64_t>(o.plan_seq_len > 0 ? o.plan_seq_len : 4096, m.model.max_positions);
  r.plan_batch = o.plan_batch;
  for (const auto& f : mir.files) r.source_bytes += int64_t(f->file().bytes().size());

  const int64_t planned = planned_bytes(program.weights);
  MI_TRY_VOID(check_space(o, planned));
  MI_TRY(auto writer, artifact::ArtifactWriter::create(out.path()));
  {
    std::optional<Progress> progress;
    if (!o.scratch) progress.emplace("pack weights", uint64_t(planned), true);
    if (auto s = emit_weights(mir, program.weights, writer, progress ? &*progress : nullptr); !s.ok())
      return s.error().with_context(mir.dir.string());
    if (progress) progress->done();
  }
  for (size_t i = 0; i < m.weights.size(); ++i) m.weights[i] = program.weights[i].tensor;
  m.memory.weight_bytes = writer.offset();
  MI_TRY_VOID(write_file(out.path() / "graph.mir", ir::print(graph)));
  MI_TRY_VOID(ir::copy_tokenizer(mir.dir, out.path()));
  const Keep keep = o.scratch ? Keep::kScratch : Keep::kSafe;
  MI_TRY_VOID(writer.finish(m, keep));
  if (o.replay_order && r.expert_order && r.expert_order->reordered() > 0) {
    MI_TRY(r.expert_order->replay, o.replay_order(out.path() / "weights.bin", m, *choices));
  }
  r.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!o.scratch) MI_TRY_VOID(write_file(out.path() / "report.html", report_html(r, graph, o.appendix)));
  r.engine_bytes = directory_bytes(out.path());
  MI_TRY_VOID(out.commit(keep));
  r.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return r;
}

}  // namespace mi::compiler
