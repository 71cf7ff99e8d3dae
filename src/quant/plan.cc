#include "quant/plan.h"

#include <algorithm>
#include <cmath>

#include "base/place.h"
#include "quant/capture.h"
#include "text/model_text.h"

namespace mi::quant {
namespace {

DType float_type_of(const ir::Graph& g) {
  for (const ir::Block& b : g.blocks)
    for (const ir::WeightDecl& d : b.weights)
      if (is_rounded_by_default(d) && !ir::is_quantized(d)) return d.dtype;
  return DType::kBF16;
}

// What the recipe rounds to where nothing else is said.
LayerFormat base_format(const QuantConfig& c) {
  if (c.weight_bits == 8) return LayerFormat::kInt8;
  return c.group_size == 32 ? LayerFormat::kInt4G32 : c.group_size == 64 ? LayerFormat::kInt4G64 : LayerFormat::kInt4G128;
}

constexpr double kLessError = 0.95;  // of what a scale per token has: from here on saturation is worth its place

// The modules that read a value, as a recipe names them.
std::vector<std::string> readers_of(const ir::Graph& g, int32_t layer, const std::string& value) {
  std::vector<std::string> modules;
  const ir::Block& b = g.block_of(layer);
  for (const MatrixUse& u : matrix_uses(b)) {
    const ir::WeightDecl& d = b.weights[size_t(u.weight)];
    if (u.value != value || !is_rounded_by_default(d)) continue;
    const std::string name = ir::full_name(d.name, layer);
    modules.push_back(name.substr(0, name.rfind('.')));
  }
  return modules;
}

}  // namespace

namespace {

// The picked formats and, behind them, the user's own: theirs are the last word.
void take(Planned& plan, const QuantConfig& asked, const std::vector<LayerFormat>& formats) {
  const std::vector<Unit>& units = plan.sensitivity.units;
  plan.config.layers.clear();
  for (size_t u = 0; u < units.size(); ++u) plan.config.layers.emplace_back(units[u].name, plan.picked->formats[u]);
  plan.config.layers.insert(plan.config.layers.end(), asked.layers.begin(), asked.layers.end());
  plan.reasons = plan.found;
  for (std::string& line : explain(plan.sensitivity, plan.costs, *plan.picked, formats)) plan.reasons.push_back(std::move(line));
}

}  // namespace

bool needs_plan(const QuantConfig& c) { return c.activations == ActivationScheme::kAuto || c.sensitive_auto || c.saturation_auto; }

Result<CalibrationSet> calibration_of(const ir::MirDir& mir, const QuantizeOptions& o) {
  MI_TRY(const text::ModelText text, text::load_model_text(o.model / "tokenizer"));
  CalibrationRequest request;
  request.file = o.calibration.empty() ? Path(o.config.calibration_data) : o.calibration;
  request.samples = o.config.calibration_samples;
  request.length = std::min(o.config.calibration_length, std::max<int64_t>(1, mir.graph.info.max_positions));
  request.vocab = mir.graph.info.vocab;
  request.draw = true;
  return load_calibration(request, text.tokenizer.get(), text.chat.get());
}

Result<CalibrationSet> other_text(const ir::MirDir& mir, const QuantizeOptions& o, const Path& file) {
  QuantizeOptions other = o;
  other.calibration = file;
  other.config.calibration_samples = INT64_MAX;
  return calibration_of(mir, other);
}

Result<Planned> plan_recipe(const QuantizeOptions& o, const PlanOptions& p, hw::ThreadPool& pool) {
  MI_TRY(const ir::MirDir mir, ir::MirDir::open(o.model));
  MI_TRY(const CalibrationSet set, calibration_of(mir, o));
  // What only the rounding after it reads is looked at before the minutes of measuring.
  MI_TRY_VOID(check_layers(o.config, mir.graph));
  MI_TRY(const Choice choice, Choice::make(o.config, mir.graph, o.model.string()));
  for (const Path& file : {o.held_out, o.traffic})
    if (!file.empty()) {
      MI_TRY(const CalibrationSet text, other_text(mir, o, file));
    }
  Planned out;
  out.config = o.config;
  QuantConfig& c = out.config;
  SensitivityOptions so;
  so.config = o.config;
  so.activations = c.activations == ActivationScheme::kAuto;
  so.saturation = c.saturation_auto;
  so.sample_tokens = p.sample_tokens;
  so.scratch = beside(o.output, ".piece");
  const LayerFormat base = base_format(c);
  so.formats = {LayerFormat::kInt8};
  if (base != LayerFormat::kInt8) so.formats.push_back(base);
  so.measured = so.formats;
  if (p.search) {
    so.formats.clear();
    for (LayerFormat f : p.formats)
      if (f != LayerFormat::kFloat) so.formats.push_back(f);
    so.measured = {LayerFormat::kInt8, so.formats.back()};
  }
  MI_TRY(out.sensitivity, measure_sensitivity(mir, set.sequences, so, pool));
  const Sensitivity& s = out.sensitivity;

  if (p.search) {
    const DType type = float_type_of(mir.graph);
    const CostTable costs = CostTable::measure(s.units, p.formats, type, pool);
    out.front = pareto_front(s, costs, p.formats, type);
    MI_TRY(out.picked, pick(out.front, p.limits));
    out.costs = costs;
  }
  if (c.sensitive_auto) {
    c.sensitive_auto = false;
    if (p.search) {
      out.found.push_back("sensitive_layers: auto gives way to the search, which has a format for every part");
    } else {
      std::vector<double> rounded;
      for (const Candidate& unit : s.candidates)
        if (!unit.static_scale && unit.format == base) rounded.push_back(unit.kl);
      const auto kept = float_units(s, base, c.bound);
      for (const Candidate* unit : kept) {
        c.sensitive_layers.push_back(unit->name);
        out.found.push_back(fmt::format("{} stays float: at {} it alone has a KL of {:.5f}", unit->name,
                                        layer_format_name(base), unit->kl));
        rounded.erase(std::find(rounded.begin(), rounded.end(), unit->kl));
      }
      out.found.push_back(fmt::format("of {} parts {} stay float; the others at {} should add a KL of {:.5f}",
                                      s.units.size(), kept.size(), layer_format_name(base), s.together(rounded)));
    }
  }
  if (c.activations == ActivationScheme::kAuto) {
    c.activations = ActivationScheme::kPerTensor;
    std::vector<std::pair<std::string, ActivationScheme>> found;
    for (const Candidate* v : per_token_values(s, c.bound)) {
      for (const std::string& module : readers_of(mir.graph, v->layer, v->value)) found.emplace_back(module, ActivationScheme::kPerToken);
      out.found.push_back(fmt::format("{} keeps a scale per token: with a static one it alone has a KL of {:.5f}", v->name, v->kl));
    }
    found.insert(found.end(), c.activation_layers.begin(), c.activation_layers.end());
    c.activation_layers = std::move(found);
  }
  if (c.saturation_auto) {
    c.saturation_auto = false;
    size_t found = 0;
    for (const Saturation& t : s.saturation) {
      if (!(t.per_token > 0 && t.saturated <= kLessError * t.per_token)) continue;
      ++found;
      for (const std::string& module : readers_of(mir.graph, t.layer, t.value)) c.saturated_layers.push_back(module);
      out.found.push_back(fmt::format("layers.{}.{} saturates: with it the layer's error from this input is {:.3f} %, without {:.3f} %",
                                        t.layer, t.value, 100 * t.saturated, 100 * t.per_token));
    }
    out.found.push_back(fmt::format("saturation at the {:g}th percentile helps {} of {} inputs", c.saturation_percentile, found, s.saturation.size()));
  }
  out.reasons = out.found;
  if (p.search) take(out, o.config, p.formats);
  return out;
}

Status check_output(const QuantizeOptions& o) {
  MI_TRY(const OutputDir out, OutputDir::create(o.output, o.force));
  return {};
}

Result<Searched> quantize_searched(const QuantizeOptions& o, PlanOptions p, std::optional<double> max_drop,
                                   hw::ThreadPool& pool) {
  constexpr int64_t kTries = 4;
  p.search = true;
  const double wanted_kl = p.limits.max_kl;
  // For a model that knows how sure it is, nats of KL are nats of log perplexity.
  if (max_drop) p.limits.max_kl = std::min(p.limits.max_kl, std::log1p(*max_drop / 100));
  const SearchLimits asked = p.limits;
  p.limits.max_kl = std::numeric_limits<double>::infinity();
  MI_TRY_VOID(check_output(o));
  Searched out;
  MI_TRY(out.plan, plan_recipe(o, p, pool));
  SearchLimits limits = asked;
  for (;;) {
    if (auto picked = pick(out.plan.front, limits); picked.ok())
      out.plan.picked = *picked;
    else if (out.tries > 0)
      return out;  // nothing better: the last result stays, and the caller judges it
    // else the least KL that the other limits allow, which plan_recipe() picked: what it gives will be seen
    take(out.plan, o.config, p.formats);
    QuantizeOptions q = o;
    q.config = out.plan.config;
    q.force = o.force || out.tries > 0;
    MI_TRY(out.report, quantize(q, pool));
    ++out.tries;
    const Predictions& r = out.report.predictions;
    const double drop = 100 * std::expm1(r.rounded_nll - r.nll);
    double excess = r.mean_kl / wanted_kl;
    if (max_drop) excess = std::max(excess, std::log1p(drop / 100) / std::log1p(*max_drop / 100));
    if (!(excess > 1) || out.tries == kTries) return out;
    limits.max_kl = std::min(out.plan.picked->kl, limits.max_kl) / excess * 0.95;
  }
}

}  // namespace mi::quant
