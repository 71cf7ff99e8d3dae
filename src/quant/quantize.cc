#include "quant/quantize.h"

#include <algorithm>
#include <optional>
#include <set>

#include "base/util.h"
#include "exec/engine.h"
#include "ir/edit.h"
#include "ir/mir_dir.h"
#include "ir/verify.h"
#include "quant/calibration_data.h"
#include "quant/compare.h"
#include "quant/observe.h"
#include "quant/rewrite.h"
#include "quant/smooth.h"
#include "quant/temporary_engine.h"
#include "text/model_text.h"

namespace mi::quant {
namespace {

constexpr int64_t kComparedTokens = 2048;
constexpr int64_t kFewTokens = 8;  // an expert seen by fewer calibration tokens is named

struct LoadedEngine {
  TemporaryEngine files;
  std::unique_ptr<exec::Engine> engine;
};

Result<LoadedEngine> make_engine(const Path& mir, const Path& beside, int opt_level, const std::string& precision,
                                 int64_t tokens, hw::ThreadPool& pool) {
  MI_TRY(TemporaryEngine files, build_temporary_engine(mir, beside, opt_level, precision));
  exec::LoadOptions l;
  l.max_tokens_per_step = tokens;
  l.kv_pages = (tokens + artifact::kKvPageTokens - 1) / artifact::kKvPageTokens;
  l.kv_type = "f32";
  l.verify_checksums = false;
  MI_TRY(auto engine, exec::Engine::load(files.path(), l, pool));
  return LoadedEngine{std::move(files), std::move(engine)};
}

struct Smoothing {
  std::vector<SmoothSite> sites;
  std::vector<std::vector<float>> scales;  // per site, [channels]
};

Result<Smoothing> plan_smoothing(const ir::MirDir& mir, const Choice& choice, const Observations& seen, double alpha,
                                 hw::ThreadPool& pool, QuantizeReport* report) {
  Smoothing s;
  for (SmoothSite& site : smooth_sites(mir.graph, &report->notes)) {
    std::vector<float> weight_max(size_t(site.channels), 0.0f);
    if (!std::all_of(site.readers.begin(), site.readers.end(),
                     [&](const std::string& reader) { return is_float(mir.weight(reader).dtype); })) {
      report->notes.push_back(fmt::format("layer {}: {} has a reader that is quantized already and is not smoothed",
                                          site.layer, site.value));
      continue;
    }
    bool any = false;
    for (const std::string& reader : site.readers) {
      if (!choice.rounds(reader)) continue;
      any = true;
      const std::vector<float> m = column_max(mir.weight(reader), pool);
      for (size_t i = 0; i < m.size(); ++i) weight_max[i] = std::max(weight_max[i], m[i]);
    }
    if (!any) continue;
    const auto it = seen.max_abs.find({site.layer, site.value});
    if (it == seen.max_abs.end()) return bad_input("calibration never reached layer {} ({})", site.layer, site.value);
    s.scales.push_back(smooth_scales(it->second, weight_max, alpha));
    s.sites.push_back(std::move(site));
  }
  return s;
}

// The declarations that smoothing touches become F32 unless they are rounded: the factors are not exact in bf16.
void widen_smoothed(ir::Graph& g, const Smoothing& s) {
  std::set<std::string> touched;
  for (const SmoothSite& site : s.sites) {
    touched.insert(site.norm_weight);
    touched.insert(site.readers.begin(), site.readers.end());
  }
  for (ir::Block& b : g.blocks)
    for (ir::WeightDecl& d : b.weights)
      for (int32_t layer : b.layers)
        if (d.format == ir::WeightFormat::kFloat && touched.count(ir::full_name(d.name, layer))) d.dtype = DType::kF32;
}

// One scale per quantize node from calibration (activation_scheme: per_tensor).
Status add_static_scales(ir::Graph& g, const Observations& seen, const Smoothing& smoothing, RewritePlan* plan) {
  std::map<ValueKey, const std::vector<float>*> divisor;
  for (size_t i = 0; i < smoothing.sites.size(); ++i)
    divisor[{smoothing.sites[i].layer, smoothing.sites[i].value}] = &smoothing.scales[i];
  for (ir::Block& b : g.blocks)
    for (ir::Node& n : b.nodes) {
      if (n.op != Op::kQuantize) continue;
      const std::string value = b.values[size_t(n.in[0])].name;
      ir::WeightDecl d{"act." + value + ".scale", DType::kF32, {1}, ir::WeightFormat::kFloat, ir::Mark::kConstant};
      for (int32_t layer : b.layers) {
        const auto it = seen.max_abs.find({layer, value});
        if (it == seen.max_abs.end()) return bad_input("calibration never reached layer {} ({})", layer, value);
        const auto div = divisor.find({layer, value});
        float amax = 0;
        for (size_t c = 0; c < it->second.size(); ++c)
          amax = std::max(amax, div == divisor.end() ? it->second[c] : it->second[c] / (*div->second)[c]);
        plan->constants[ir::full_name(d.name, layer)] = amax / 127.0f;
      }
      n.weights.push_back({Role::kInScale, {int32_t(b.weights.size())}});
      b.weights.push_back(std::move(d));
    }
  return {};
}

void note_rare_experts(const Observations& seen, QuantizeReport* report) {
  for (const auto& [layer, counts] : seen.expert_tokens) {
    int64_t few = 0, first = -1;
    for (size_t e = 0; e < counts.size(); ++e)
      if (counts[e] < kFewTokens) {
        ++few;
        if (first < 0) first = int64_t(e);
      }
    if (few > 0)
      report->notes.push_back(
          fmt::format("layer {}: {} of {} experts saw fewer than {} calibration tokens (first: expert {})", layer, few,
                      counts.size(), kFewTokens, first));
  }
}

int64_t weights_bytes(const ir::Graph& g) {
  int64_t bytes = 0;
  for (const auto& d : ir::declared_tensors(g))
    bytes += shape_count(d.shape).value_or(0) * int64_t(dtype_bytes(d.dtype));
  return bytes;
}

}  // namespace

Result<QuantizeReport> quantize(const QuantizeOptions& o, hw::ThreadPool& pool) {
  QuantizeReport report;
  MI_TRY(const ir::MirDir mir, ir::MirDir::open(o.model));
  MI_TRY(const Choice choice, Choice::make(o.config, mir.graph, o.model.string()));
  MI_TRY(OutputDir out, OutputDir::create(o.output, o.force));
  report.chosen = choice.counts();
  report.weight_bits = o.config.weight_bits;
  report.group_size = o.config.weight_bits == 4 ? o.config.group_size : 0;
  report.quantized_matrices = choice.rounded();
  report.float_matrices = choice.kept();

  // Calibrate on the plain float graph, where anything needs it: its engine takes the model's size in fp32.
  const bool per_tensor = o.config.activations == ActivationScheme::kPerTensor;
  CalibrationSet set;
  std::optional<LoadedEngine> reference;
  Observations seen;
  const int64_t length = std::min(o.config.calibration_length, std::max<int64_t>(1, mir.graph.info.max_positions));
  if (o.config.smooth || per_tensor || o.compare) {
    MI_TRY(const text::ModelText text, text::load_model_text(o.model / "tokenizer"));
    CalibrationRequest request;
    request.file = o.calibration.empty() ? Path(o.config.calibration_data) : o.calibration;
    request.samples = o.config.calibration_samples;
    request.length = length;
    request.vocab = mir.graph.info.vocab;
    MI_TRY(set, load_calibration(request, text.tokenizer.get(), text.chat.get()));
    report.calibration_source = set.source;
    report.calibration_hash = set.hash;
    report.calibration_sequences = int64_t(set.sequences.size());
    report.calibration_tokens = set.tokens;
    const std::string precision = first_quantized(mir.graph) ? "" : "fp32";
    MI_TRY(LoadedEngine made, make_engine(o.model, Path(o.output).concat(".calibration"), 0, precision, length, pool));
    reference.emplace(std::move(made));
  }
  if (o.config.smooth || per_tensor) {
    seen = observe(*reference->engine, mir.graph, set);
    note_rare_experts(seen, &report);
  }

  // Decide, then write.
  Smoothing smoothing;
  if (o.config.smooth) {
    MI_TRY(smoothing, plan_smoothing(mir, choice, seen, o.config.smooth_alpha, pool, &report));
  }
  report.smoothed_sites = int64_t(smoothing.sites.size());
  RewritePlan plan;
  if (o.config.weights != WeightScheme::kPerGroup) plan.int8_scheme = o.config.weights;
  for (size_t i = 0; i < smoothing.sites.size(); ++i) {
    const SmoothSite& site = smoothing.sites[i];
    plan.tensors[site.norm_weight] = {nullptr, &smoothing.scales[i], site.plus_one};
    for (const std::string& reader : site.readers) plan.tensors[reader].column_scale = &smoothing.scales[i];
  }
  ir::Graph g = mir.graph;
  if (choice.rounds_tied_head()) {
    untie_head(g);
    plan.sources[kHeadWeight] = kEmbeddingWeight;
  }
  MI_TRY_VOID(ir::to_quantized(g, [&](int32_t layer, const ir::WeightDecl& d) { return choice.format(layer, d); }));
  widen_smoothed(g, smoothing);
  if (per_tensor) MI_TRY_VOID(add_static_scales(g, seen, smoothing, &plan));
  MI_TRY_VOID(ir::verify(g));

  std::map<int32_t, WeightError> errors;
  MI_TRY(ir::MirWriter writer, ir::MirWriter::create(out.path(), g));
  MI_TRY_VOID(rewrite_tensors(mir, g, plan, writer, pool, &errors));
  MI_TRY_VOID(ir::copy_tokenizer(o.model, out.path()));
  report.bytes_before = weights_bytes(mir.graph);
  report.bytes_after = weights_bytes(g);

  Json layers = Json::array();
  for (const auto& [pattern, format] : o.config.layers) layers.push_back({pattern, layer_format_name(format)});
  Json provenance = mir.provenance;
  provenance["quantize"] = {
      {"weight_bits", o.config.weight_bits},
      {"weight_scheme", o.config.weights == WeightScheme::kPerGroup
                            ? fmt::format("per_group of {}", o.config.group_size)
                        : o.config.weights == WeightScheme::kPerChannel ? "per_channel"
                                                                        : "per_tensor"},
      {"activation_scheme", o.config.activations == ActivationScheme::kPerToken ? "per_token" : "per_tensor"},
      {"smooth_quant", {{"enable", o.config.smooth}, {"alpha", o.config.smooth_alpha}}},
      {"sensitive_layers", o.config.sensitive_layers},
      {"layers", std::move(layers)},
      {"calibration",
       {{"source", set.source}, {"xxh3", set.hash}, {"sequences", set.sequences.size()}, {"tokens", set.tokens}}}};
  MI_TRY_VOID(writer.finish(g, provenance));

  if (o.compare) {
    MI_TRY(LoadedEngine rounded, make_engine(out.path(), Path(o.output).concat(".comparison"), 2, "", length, pool));
    Comparison c = compare(*reference->engine, *rounded.engine, set, kComparedTokens);
    report.layers = std::move(c.layers);
    for (LayerDeviation& d : report.layers) d.weight_error = errors[d.layer].relative();
    report.mean_kl = c.mean_kl;
    report.max_kl = c.max_kl;
    report.top1_agreement = c.top1_agreement;
    report.compared_tokens = c.tokens;
  }
  MI_TRY_VOID(out.commit());
  return report;
}

std::string report_text(const QuantizeReport& r) {
  std::string s;
  s += r.calibration_source.empty() ? std::string("calibration   not needed by this recipe\n")
                                    : fmt::format("calibration   {}: {} sequences, {} tokens\n", r.calibration_source,
                                                  r.calibration_sequences, r.calibration_tokens);
  for (const Choice::Count& c : r.chosen)
    s += c.format == LayerFormat::kFloat
             ? fmt::format("kept in float '{}' matches {} matrices\n", c.pattern, c.matches)
             : fmt::format("{}          '{}' matches {} matrices\n", layer_format_name(c.format), c.pattern, c.matches);
  const std::string format =
      r.weight_bits == 4 ? fmt::format("int4 (W4A8, groups of {})", r.group_size) : "int8 (W8A8)";
  s += fmt::format("matrices      {} {}, {} kept in float by the recipe, {} norms smoothed\n", r.quantized_matrices,
                   format, r.float_matrices, r.smoothed_sites);
  s += fmt::format("weights       {} -> {}\n", human_bytes(double(r.bytes_before)), human_bytes(double(r.bytes_after)));
  for (const std::string& n : r.notes) s += fmt::format("note          {}\n", n);
  if (r.layers.empty()) return s;
  s += fmt::format("\nagainst the float model, {} tokens: mean KL {:.5f}, largest {:.5f}, same best token {:.2f} %\n",
                   r.compared_tokens, r.mean_kl, r.max_kl, 100 * r.top1_agreement);
  s += "layer  deviation  cosine    weights\n";
  for (const LayerDeviation& d : r.layers)
    s += fmt::format("{:>5}  {:>8.3f}%  {:.6f}  {:>6.3f}%\n", d.layer, 100 * d.relative_rms, d.cosine,
                     100 * d.weight_error);
  return s;
}

Json report_json(const QuantizeReport& r) {
  Json j;
  j["calibration"] = {{"source", r.calibration_source},
                      {"xxh3", r.calibration_hash},
                      {"sequences", r.calibration_sequences},
                      {"tokens", r.calibration_tokens}};
  j["weight_bits"] = r.weight_bits;
  if (r.weight_bits == 4) j["group_size"] = r.group_size;
  j["quantized_matrices"] = r.quantized_matrices;
  j["float_matrices"] = r.float_matrices;
  j["smoothed_sites"] = r.smoothed_sites;
  j["bytes_before"] = r.bytes_before;
  j["bytes_after"] = r.bytes_after;
  j["notes"] = r.notes;
  j["patterns"] = Json::array();
  for (const Choice::Count& c : r.chosen)
    j["patterns"].push_back({{"pattern", c.pattern}, {"format", layer_format_name(c.format)}, {"matches", c.matches}});
  j["mean_kl"] = r.mean_kl;
  j["max_kl"] = r.max_kl;
  j["top1_agreement"] = r.top1_agreement;
  j["compared_tokens"] = r.compared_tokens;
  j["layers"] = Json::array();
  for (const LayerDeviation& d : r.layers)
    j["layers"].push_back(
        {{"layer", d.layer}, {"relative_rms", d.relative_rms}, {"cosine", d.cosine}, {"weight_error", d.weight_error}});
  return j;
}

}  // namespace mi::quant
