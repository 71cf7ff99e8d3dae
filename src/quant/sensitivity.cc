#include "quant/sensitivity.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "base/util.h"
#include "ir/edit.h"
#include "ir/verify.h"
#include "quant/compare.h"
#include "quant/rewrite.h"
#include "quant/scales.h"

namespace mi::quant {
namespace {

// "layers.7.attn" of the whole model is "layers.0.attn" of the piece.
std::string in_piece(const std::string& name, int32_t layer) {
  const std::string prefix = fmt::format("layers.{}.", layer);
  return name.starts_with(prefix) ? "layers.0." + name.substr(prefix.size()) : name;
}

struct Added {
  double error = 0, cosine = 1;
};
// Of what a layer adds: out - in.
Added compare_added(std::span<const float> in, std::span<const float> reference, std::span<const float> rounded) {
  double err2 = 0, ref2 = 0, oth2 = 0, dot = 0;
  for (size_t i = 0; i < in.size(); ++i) {
    const double a = double(reference[i]) - in[i], b = double(rounded[i]) - in[i];
    err2 += (b - a) * (b - a);
    ref2 += a * a;
    oth2 += b * b;
    dot += a * b;
  }
  return {ref2 > 0 ? std::sqrt(err2 / ref2) : 0, ref2 > 0 && oth2 > 0 ? dot / std::sqrt(ref2 * oth2) : 1};
}

class Analyst {
 public:
  Analyst(const ir::MirDir& mir, const SensitivityOptions& o, hw::ThreadPool& pool) : mir_(mir), o_(o), pool_(pool) {}

  Result<Sensitivity> run(const Sequences& all) {
    s_.units = units_of(mir_.graph);
    if (s_.units.empty()) return bad_input("{}: nothing in this model can be rounded", mir_.dir.string());
    split(all);
    s_.tokens = token_count(sample_);
    longest_ = longest_of(all);
    const size_t hidden = size_t(mir_.graph.info.hidden);
    calibration_rows_.resize(size_t(token_count(calibration_)) * hidden);
    rows_.resize(size_t(s_.tokens) * hidden);
    for (const ir::Block* b : {&mir_.graph.prologue, &mir_.graph.epilogue}) MI_TRY_VOID(check_finite(mir_, *b, -1, pool_));
    {
      MI_TRY(PieceEngine ends, piece(ir::piece_of(mir_, -1), 0));
      ends.run_embedding(calibration_, calibration_rows_);
      ends.run_embedding(sample_, rows_);
    }
    for (LayerFormat f : o_.measured) {
      s_.joint.push_back({f, 0, 0});
      joint_rows_.push_back(rows_);
    }
    Progress progress("sensitivity, layers", uint64_t(mir_.graph.info.layers), false);
    for (int32_t layer = 0; layer < mir_.graph.info.layers; ++layer) {
      MI_TRY_VOID(one_layer(layer));
      progress.advance(1);
    }
    progress.done();
    MI_TRY_VOID(head());
    estimate();
    s_.fit_power();
    std::stable_sort(s_.peaks.begin(), s_.peaks.end(), [](const Peak& a, const Peak& b) {
      return std::pair(a.massive(), a.ratio()) > std::pair(b.massive(), b.ratio());
    });
    return std::move(s_);
  }

 private:
  Result<PieceEngine> piece(const ir::MirDir& m, int opt_level) {
    return PieceEngine::build(m, o_.scratch, opt_level, longest_, pool_);
  }

  void split(const Sequences& all) {
    int64_t tokens = 0;
    size_t i = all.size();
    while (i > 0 && tokens < o_.sample_tokens) {
      const std::vector<int32_t>& ids = all[--i];
      const int64_t n = std::min<int64_t>(int64_t(ids.size()), o_.sample_tokens - tokens);
      sample_.emplace_back(ids.begin(), ids.begin() + n);
      tokens += n;
    }
    calibration_.assign(all.begin(), all.begin() + ptrdiff_t(i));
    if (calibration_.empty()) calibration_ = all;
  }

  // The recipe for a one-layer model in which nothing is rounded yet.
  QuantConfig float_config(int32_t layer) const {
    QuantConfig config = o_.config;
    // The piece's layer is its layer 0.
    config.layer_alpha.clear();
    if (const auto it = o_.config.layer_alpha.find(layer); it != o_.config.layer_alpha.end())
      config.layer_alpha[0] = it->second;
    config.layers = {{"re:.*", LayerFormat::kFloat}};
    config.sensitive_layers.clear();
    config.activations = ActivationScheme::kPerToken;
    config.activation_layers.clear();
    config.saturated_layers.clear();
    return config;
  }

  // ... with the matrices that read a value at int8.
  enum class Scale : uint8_t { kPerToken, kStatic, kSaturates };
  QuantConfig value_config(const ir::MirDir& one, int32_t layer, const std::string& value, Scale scale) const {
    QuantConfig config = float_config(layer);
    config.rounding = Rounding::kNearest;
    for (const MatrixUse& u : matrix_uses(one.graph.blocks[0])) {
      const ir::WeightDecl& d = one.graph.blocks[0].weights[size_t(u.weight)];
      if (u.value != value || !is_rounded_by_default(d)) continue;
      std::string module = ir::full_name(d.name, 0);
      module = module.substr(0, module.rfind('.'));
      config.layers.emplace_back(module, LayerFormat::kInt8);
      if (scale == Scale::kStatic) config.activation_layers.emplace_back(module, ActivationScheme::kPerTensor);
      if (scale == Scale::kSaturates) config.saturated_layers.push_back(module);
    }
    return config;
  }

  // ... with only what the candidate names rounded.
  QuantConfig config_of(const ir::MirDir& one, const Candidate& c) const {
    if (c.static_scale) return value_config(one, c.layer, c.value, Scale::kStatic);
    QuantConfig config = float_config(c.layer);
    config.layers.emplace_back(in_piece(c.name, c.layer), c.format);
    return config;
  }

  // ... with all of a layer's units in one format.
  QuantConfig joint_config(int32_t layer, LayerFormat f) const {
    QuantConfig config = float_config(layer);
    for (const Unit& u : s_.units)
      if (u.layer == layer) config.layers.emplace_back(in_piece(u.name, layer), f);
    return config;
  }

  Result<ir::MirDir> rounded_form(const ir::MirDir& one, const QuantConfig& config, const LayerCapture& seen) {
    MI_TRY(const Choice choice, Choice::make(config, one.graph, one.dir.string()));
    ir::MirDir m = one;
    MI_TRY_VOID(ir::to_quantized(m.graph, [&](int32_t layer, const ir::WeightDecl& d) { return choice.format(layer, d); }));
    LayerPlan plan;
    plan.seen = &seen;
    if (config.smooth) {
      const std::set<std::string> touched = smoothed_tensors(one, choice, config.smooth_down);
      for (ir::WeightDecl& d : m.graph.blocks[0].weights)
        if (d.format == ir::WeightFormat::kFloat && touched.count(ir::full_name(d.name, 0))) d.dtype = DType::kF32;
      std::vector<std::string> notes;
      plan.smoothing = plan_smoothing(one, one.graph.blocks[0], choice, seen, config, pool_, &notes);
    }
    MI_TRY(const StoredScales scales, StoredScales::choose(config, m.graph));
    scales.declare(m.graph);
    if (scales.any()) plan.constants = scales.measure(seen, plan.smoothing, config);
    MI_TRY_VOID(ir::verify(m.graph));
    for (auto& [name, tensor] : round_layer(one, m.graph.blocks[0], 0, plan, config, pool_).made) m.made[name] = tensor;
    return m;
  }

  Status one_layer(int32_t layer) {
    MI_TRY_VOID(check_finite(mir_, mir_.graph.block_of(layer), layer, pool_));
    const ir::MirDir one = ir::piece_of(mir_, layer);
    std::vector<float> out(rows_.size());
    LayerCapture seen;
    {
      MI_TRY(PieceEngine engine, piece(one, 0));
      seen = capture_layer(engine, one.graph.blocks[0], 0, calibration_, calibration_rows_, calibration_rows_,
                           o_.config.gptq_tokens);
      engine.run_layer(sample_, rows_, out);
      if (!running_.empty()) engine.run_layer(together_, population_, population_);
    }
    for (const auto& [value, fed] : seen.values) s_.peaks.push_back(peak_of(layer, value, fed.rows, fed.cols));
    std::vector<Candidate> mine;
    for (const Unit& u : s_.units)
      if (u.layer == layer)
        for (LayerFormat f : o_.formats) mine.push_back({u.name, layer, f, false, "", 0, 1, 0, false});
    std::set<std::string> values;
    for (const Unit& u : s_.units)
      if (u.layer == layer) values.insert(u.values.begin(), u.values.end());
    if (o_.activations) {
      for (const std::string& v : values)
        mine.push_back({fmt::format("layers.{}.{}", layer, v), layer, LayerFormat::kInt8, true, v, 0, 1, 0, false});
    }
    std::vector<float> rounded(rows_.size());
    for (Candidate& c : mine) {
      MI_TRY(const ir::MirDir form, rounded_form(one, config_of(one, c), seen));
      MI_TRY(PieceEngine engine, piece(form, 2));
      engine.run_layer(sample_, rows_, rounded);
      const Added a = compare_added(rows_, out, rounded);
      c.error = a.error;
      c.cosine = a.cosine;
      c.measured = c.static_scale ||
                   std::find(o_.measured.begin(), o_.measured.end(), c.format) != o_.measured.end();
      if (c.measured) {
        running_.push_back(s_.candidates.size());
        together_.insert(together_.end(), sample_.begin(), sample_.end());
        population_.insert(population_.end(), rounded.begin(), rounded.end());
      }
      s_.candidates.push_back(c);
    }
    if (o_.saturation)
      for (const std::string& v : values) {
        Saturation t{layer, v, 0, 0};
        for (const Scale scale : {Scale::kPerToken, Scale::kSaturates}) {
          MI_TRY(const ir::MirDir form, rounded_form(one, value_config(one, layer, v, scale), seen));
          MI_TRY(PieceEngine engine, piece(form, 2));
          engine.run_layer(sample_, rows_, rounded);
          (scale == Scale::kPerToken ? t.per_token : t.saturated) = compare_added(rows_, out, rounded).error;
        }
        s_.saturation.push_back(std::move(t));
      }
    for (size_t i = 0; i < s_.joint.size(); ++i) {
      MI_TRY(const ir::MirDir form, rounded_form(one, joint_config(layer, s_.joint[i].format), seen));
      MI_TRY(PieceEngine engine, piece(form, 2));
      engine.run_layer(sample_, joint_rows_[i], joint_rows_[i]);
    }
    rows_ = std::move(out);
    return {};
  }

  Status head() {
    MI_TRY(PieceEngine head, piece(ir::piece_of(mir_, -1), 2));
    const int64_t hidden = head.hidden(), vocab = head.vocab();
    // Sequence by sequence, so that the float model's logits of one stay in memory.
    int64_t first = 0, scored = 0;
    std::vector<std::span<const float>> streams;
    for (size_t i = 0; i < running_.size(); ++i) streams.push_back(std::span(population_).subspan(i * rows_.size(), rows_.size()));
    streams.insert(streams.end(), joint_rows_.begin(), joint_rows_.end());
    std::vector<double> kl(streams.size());
    for (const std::vector<int32_t>& ids : sample_) {
      const Sequences s = {ids};
      const size_t n = ids.size() * size_t(hidden), at = size_t(first * hidden);
      std::vector<float> reference(ids.size() * size_t(vocab));
      head.run_head(s, std::span(rows_).subspan(at, n), [&](int64_t row, std::span<const float> logits) {
        std::copy(logits.begin(), logits.end(), reference.begin() + row * vocab);
      });
      for (size_t t = 0; t + 1 < ids.size(); ++t, ++scored) {
        const float* l = reference.data() + t * size_t(vocab);
        s_.nll += log_sum_exp(l, vocab) - l[ids[t + 1]];
      }
      for (size_t i = 0; i < streams.size(); ++i)
        head.run_head(s, streams[i].subspan(at, n),
                      [&](int64_t row, std::span<const float> logits) {
                        const int64_t rows = int64_t(logits.size()) / vocab;
                        std::vector<double> each(static_cast<size_t>(rows));
                        pool_.run(rows, [&](int64_t r, int) {
                          each[size_t(r)] = kl_divergence(reference.data() + (row + r) * vocab,
                                                          logits.data() + r * vocab, vocab);
                        });
                        for (double v : each) kl[i] += v;
                      });
      first += int64_t(ids.size());
    }
    if (scored > 0) s_.nll /= double(scored);
    for (size_t i = 0; i < running_.size(); ++i) s_.candidates[running_[i]].kl = kl[i] / double(s_.tokens);
    for (size_t i = 0; i < s_.joint.size(); ++i) s_.joint[i].kl = kl[running_.size() + i] / double(s_.tokens);
    return {};
  }

  // A small perturbation's KL grows with the square of its size: formats that did not run take the KL of a measured
  // format of the same bits, by the squares of their layers' errors.
  void estimate() {
    for (Candidate& c : s_.candidates) {
      if (c.measured || c.static_scale) continue;
      const Candidate* like = nullptr;
      for (const Candidate& m : s_.candidates)
        if (m.measured && !m.static_scale && m.name == c.name &&
            (!like || (m.format == LayerFormat::kInt8) == (c.format == LayerFormat::kInt8)))
          like = &m;
      if (like && like->error > 0) c.kl = like->kl * (c.error / like->error) * (c.error / like->error);
    }
  }

  const ir::MirDir& mir_;
  const SensitivityOptions& o_;
  hw::ThreadPool& pool_;
  Sensitivity s_;
  Sequences calibration_, sample_, together_;  // together_: the sample, once per running candidate
  std::vector<float> calibration_rows_, rows_, population_;
  std::vector<size_t> running_;
  std::vector<std::vector<float>> joint_rows_;  // by s_.joint
  int64_t longest_ = 0;
};

}  // namespace

Peak peak_of(int32_t layer, const std::string& value, std::span<const float> rows, int64_t cols) {
  Peak p{layer, value, 0, 0, 0, 0};
  if (rows.empty()) return p;
  double sum2 = 0;
  float top = 0;
  for (float v : rows) {
    sum2 += double(v) * v;
    top = std::max(top, std::fabs(v));
  }
  p.largest = top;
  p.rms = std::sqrt(sum2 / double(rows.size()));
  std::vector<float> magnitudes;
  const size_t step = sampling_step(rows.size(), cols);
  for (size_t i = 0; i < rows.size(); i += step) magnitudes.push_back(std::fabs(rows[i]));
  const auto middle = magnitudes.begin() + ptrdiff_t(magnitudes.size() / 2);
  std::nth_element(magnitudes.begin(), middle, magnitudes.end());
  p.median = *middle;
  const int64_t count = int64_t(rows.size()) / cols;
  int64_t with = 0;
  for (int64_t r = 0; r < count; ++r) {
    const auto row = rows.subspan(size_t(r * cols), size_t(cols));
    with += std::any_of(row.begin(), row.end(), [&](float v) { return std::fabs(v) > top / 10; });
  }
  p.token_share_permille = with * 1000 / count;
  return p;
}

const Candidate* Sensitivity::find(const std::string& name, LayerFormat f) const {
  for (const Candidate& c : candidates)
    if (!c.static_scale && c.name == name && c.format == f) return &c;
  return nullptr;
}

namespace {
double power_sum(const std::vector<double>& v, double p) {
  const double top = v.empty() ? 0 : *std::max_element(v.begin(), v.end());
  if (!(top > 0)) return 0;
  double sum = 0;
  for (double x : v) sum += std::pow(std::max(x, 0.0) / top, p);
  return top * std::pow(sum, 1 / p);
}
}  // namespace

double Sensitivity::together(const std::vector<double>& kl) const { return power_sum(kl, power); }

void Sensitivity::fit_power() {
  std::vector<std::pair<std::vector<double>, double>> wanted;
  for (Joint& j : joint) {
    std::vector<double> own;
    for (const Candidate& c : candidates)
      if (!c.static_scale && c.format == j.format) own.push_back(c.kl);
    j.sum = power_sum(own, 1);
    if (own.size() > 1 && j.sum > 0 && j.kl > 0) wanted.emplace_back(std::move(own), j.kl);
  }
  power = 1;
  if (wanted.empty()) return;
  // Predictions fall with the power: where they are, in the mean of their logarithms, what was measured.
  double low = 0.5, high = 16;
  for (int i = 0; i < 60; ++i) {
    power = (low + high) / 2;
    double excess = 0;
    for (const auto& [own, kl] : wanted) excess += std::log(power_sum(own, power) / kl);
    (excess > 0 ? low : high) = power;
  }
}

std::vector<int32_t> Sensitivity::order() const {
  std::map<int32_t, double> kl, peak;
  for (const Candidate& c : candidates)
    if (!c.static_scale && c.format == LayerFormat::kInt8) kl[c.layer] += c.kl;
  for (const Peak& p : peaks)
    if (p.massive()) peak[p.layer] = std::max(peak[p.layer], p.ratio());
  std::vector<int32_t> layers;
  for (const auto& [layer, v] : kl) layers.push_back(layer);
  std::stable_sort(layers.begin(), layers.end(), [&](int32_t a, int32_t b) {
    return std::pair(peak[a], kl[a]) > std::pair(peak[b], kl[b]);
  });
  return layers;
}

Result<Sensitivity> measure_sensitivity(const ir::MirDir& mir, const Sequences& sequences, const SensitivityOptions& o,
                                        hw::ThreadPool& pool) {
  if (first_quantized(mir.graph))
    return bad_input("{}: parts of this model are rounded already; sensitivity is measured on a float one",
                     mir.dir.string());
  return Analyst(mir, o, pool).run(sequences);
}

std::string sensitivity_text(const Sensitivity& s) {
  std::string out = fmt::format("sensitivity, {} tokens: what rounding a part alone does (error of what its layer adds, KL of the predictions)\n"
                                "{:<28} {:<9} {:>9} {:>10} {:>11}\n", s.tokens, "part", "format", "error", "cosine", "KL");
  for (int32_t layer : s.order())
    for (const Candidate& c : s.candidates)
      if (c.layer == layer)
        out += fmt::format("{:<28} {:<9} {:>8.3f}% {:>10.6f} {:>10.6f}{}\n", c.name,
                           c.static_scale ? "static" : layer_format_name(c.format), 100 * c.error, c.cosine, c.kl,
                           c.measured ? "" : " *");
  if (std::any_of(s.candidates.begin(), s.candidates.end(), [](const Candidate& c) { return !c.measured; }))
    out += "* estimated from the error\n";
  for (const Joint& t : s.joint)
    out += fmt::format("all parts at {}: KL {:.5f}, the sum of their own is {:.5f}\n", layer_format_name(t.format), t.kl, t.sum);
  if (!s.joint.empty()) out += fmt::format("together parts cost (sum of KL^p)^(1/p), p = {:.3f}\n", s.power);
  for (const Saturation& t : s.saturation)
    out += fmt::format("saturation: layers.{}.{}: error {:.3f} %, with a scale per token as it comes {:.3f} %\n", t.layer, t.value,
                       100 * t.saturated, 100 * t.per_token);
  int shown = 0;
  for (const Peak& p : s.peaks) {
    if (!p.massive() || ++shown > 20) break;
    out += fmt::format("massive activations: layer {} {}: largest {:.1f}, {:.0f} times the rms, median {:.3g}, in {:.1f} % of the rows\n",
                       p.layer, p.value, p.largest, p.ratio(), p.median, double(p.token_share_permille) / 10);
  }
  return out;
}

Json sensitivity_json(const Sensitivity& s) {
  Json j;
  j["tokens"] = s.tokens;
  j["nll"] = s.nll;
  j["order"] = s.order();
  j["candidates"] = Json::array();
  for (const Candidate& c : s.candidates)
    j["candidates"].push_back({{"part", c.name},
                               {"layer", c.layer},
                               {"format", c.static_scale ? "static" : layer_format_name(c.format)},
                               {"error", c.error},
                               {"cosine", c.cosine},
                               {"kl", c.kl},
                               {"measured", c.measured}});
  j["joint"] = Json::array();
  for (const Joint& t : s.joint) j["joint"].push_back({{"format", layer_format_name(t.format)}, {"kl", t.kl}, {"sum", t.sum}});
  j["power"] = s.power;
  j["saturation"] = Json::array();
  for (const Saturation& t : s.saturation)
    j["saturation"].push_back({{"layer", t.layer}, {"value", t.value}, {"per_token", t.per_token}, {"saturated", t.saturated}});
  j["peaks"] = Json::array();
  for (const Peak& p : s.peaks)
    j["peaks"].push_back({{"layer", p.layer}, {"value", p.value}, {"largest", p.largest}, {"rms", p.rms}, {"ratio", p.ratio()},
                          {"median", p.median}, {"rows_permille", p.token_share_permille}, {"massive", p.massive()}});
  return j;
}

}  // namespace mi::quant
