#include "quant/quantize.h"

#include <algorithm>
#include <cmath>
#include <future>
#include <optional>
#include <set>

#include "base/place.h"
#include "base/util.h"
#include "base/version.h"
#include "ir/edit.h"
#include "ir/text.h"
#include "ir/verify.h"
#include "quant/calibration_data.h"
#include "quant/kept.h"
#include "quant/mix.h"
#include "quant/plan.h"
#include "quant/rewrite.h"
#include "quant/scales.h"
#include "text/model_text.h"

namespace mi::quant {
namespace {

constexpr int64_t kForcedTokens = 256;  // shown to experts that calibration does not reach, where the recipe wants it

int64_t weights_bytes(const ir::Graph& g) {
  int64_t bytes = 0;
  for (const auto& d : ir::declared_tensors(g))
    bytes += shape_count(d.shape).value_or(0) * int64_t(dtype_bytes(d.dtype));
  return bytes;
}

std::map<std::string, int64_t> formats_of(const ir::Graph& g) {
  std::map<std::string, int64_t> n;
  for (const ir::Block& b : g.blocks)
    for (const ir::WeightDecl& d : b.weights)
      if (ir::is_quantized(d)) n[ir::format_text(d)] += int64_t(b.layers.size());
  for (const ir::WeightDecl& d : g.epilogue.weights)
    if (ir::is_quantized(d)) ++n[ir::format_text(d)];
  return n;
}

bool any_spread(const QuantConfig& c, const ir::Graph& g) {
  for (const ir::Block& b : g.blocks)
    for (const ir::WeightDecl& d : b.weights)
      if (wants_spread(d, c)) return true;
  return false;
}

constexpr int64_t kHeldOutTokens = 2048;

// Every eighth sequence is held out, until there are enough tokens; of fewer than eight, none: then the comparison is
// made on calibration text. What is held out does not depend on how much is compared: the same recipe gives the same
// bytes with any comparison and with none.
struct Split {
  Sequences calibration, compared;
  bool held_out = false;
};
Split split(Sequences all) {
  Split s;
  s.held_out = all.size() >= 8;
  if (!s.held_out) {
    s.compared = all;
    s.calibration = std::move(all);
    return s;
  }
  for (size_t i = 0; i < all.size(); ++i)
    (i % 8 == 7 && token_count(s.compared) < kHeldOutTokens ? s.compared : s.calibration).push_back(std::move(all[i]));
  return s;
}

// The first sequences with at least `tokens`.
void keep_first(Sequences& s, int64_t tokens) {
  int64_t seen = 0;
  size_t n = 0;
  while (n < s.size() && seen < tokens) seen += int64_t(s[n++].size());
  s.resize(n);
}

// The recipe with the calibration text that was used under a name that holds from anywhere.
QuantConfig recipe_of(const QuantizeOptions& o) {
  QuantConfig c = o.config;
  if (!o.calibration.empty()) c.calibration_data = o.calibration.string();
  if (!c.calibration_data.empty())
    c.calibration_data = std::filesystem::absolute(c.calibration_data).lexically_normal().string();
  return c;
}

Json provenance_of(const QuantizeOptions& o, const ir::MirDir& mir, const CalibrationSet& set, const QuantizeReport& r) {
  const QuantConfig& c = o.config;
  Json layers = Json::array(), activations = Json::array(), alphas = Json::object();
  for (const auto& [pattern, format] : c.layers) layers.push_back({pattern, layer_format_name(format)});
  for (const auto& [pattern, scheme] : c.activation_layers) activations.push_back({pattern, name_of(scheme)});
  for (const auto& [layer, alpha] : c.layer_alpha) alphas[std::to_string(layer)] = alpha;
  Json p = mir.provenance;
  const bool calibrated = r.calibration_tokens > 0;  // text that was only compared on is no part of the result
  p["quantize"] = {
      {"weight_bits", c.weight_bits},
      {"weight_scheme", c.weights == WeightScheme::kPerGroup     ? fmt::format("per_group of {}", c.group_size)
                        : c.weights == WeightScheme::kPerChannel ? "per_channel"
                                                                 : "per_tensor"},
      {"rounding", name_of(c.rounding)},
      {"gptq", {{"damping", c.gptq_damping}, {"tokens", c.gptq_tokens}}},
      {"coverage", {{"min_tokens", c.min_expert_tokens}, {"force", c.force_experts}}},
      {"activation_scheme", name_of(c.activations)},
      {"activations", std::move(activations)},
      {"observer", name_of(c.observer)},
      {"percentile", c.percentile},
      {"smooth_quant",
       {{"enable", c.smooth},
        {"alpha", c.search_alpha ? Json("search") : Json(c.smooth_alpha)},
        {"layers", std::move(alphas)},
        {"down", c.smooth_down}}},
      {"sensitive_layers", c.sensitive_layers},
      {"layers", std::move(layers)},
      {"calibration",
       {{"source", calibrated ? set.source : ""}, {"xxh3", calibrated ? set.hash : ""}, {"sequences", r.calibration_sequences}, {"tokens", r.calibration_tokens}}}};
  if (!c.saturated_layers.empty())
    p["quantize"]["saturation"] = {{"percentile", c.saturation_percentile}, {"layers", c.saturated_layers}};
  return p;
}

int64_t note_rare_experts(const LayerCapture& seen, int64_t min_tokens, QuantizeReport* report) {
  int64_t few = 0, first = -1;
  for (size_t e = 0; e < seen.expert_tokens.size(); ++e)
    if (seen.expert_tokens[e] < min_tokens) {
      ++few;
      if (first < 0) first = int64_t(e);
    }
  if (few > 0)
    report->notes.push_back(fmt::format("layer {}: {} of {} experts saw fewer than {} calibration tokens (first: expert {})",
                                        seen.layer, few, seen.expert_tokens.size(), min_tokens, first));
  return few;
}

// Residual streams before the layer that comes next.
struct Rows {
  std::vector<float> calibration;  // through the float layers, or through the rounded ones when errors are spread
  std::vector<float> compared, rounded;  // of the compared sequences, through float and rounded layers
};

class Walk {
 public:
  Walk(const QuantizeOptions& o, const ir::MirDir& mir, hw::ThreadPool& pool) : o_(o), mir_(mir), pool_(pool) {}

  Result<QuantizeReport> run() {
    MI_TRY_VOID(check_layers(o_.config, mir_.graph));
    MI_TRY(const Choice choice, Choice::make(o_.config, mir_.graph, o_.model.string()));
    MI_TRY(OutputDir out, OutputDir::create(o_.output, o_.force));
    report_.chosen = choice.counts();
    report_.notes = o_.config.notes;
    report_.notes.insert(report_.notes.end(), choice.notes().begin(), choice.notes().end());
    report_.float_matrices = choice.kept();
    MI_TRY_VOID(declare(choice));
    spread_ = any_spread(o_.config, rounded_.graph);
    capture_ = o_.config.smooth || scales_.any() || spread_;
    if (capture_ || o_.compare) MI_TRY_VOID(load_text());

    if (report_.bytes_before >= o_.keep_from) {
      MI_TRY(kept_, KeptFiles::open(o_.output, key()));
    }
    MI_TRY(ir::MirWriter writer, ir::MirWriter::create(out.path(), rounded_.graph, o_.shard_bytes, kept_.path()));
    Progress progress("quantize", uint64_t(report_.bytes_before), true);
    place_ = 0;
    if (writer.first() > 0)
      report_.notes.push_back(fmt::format("went on from an earlier run: {} of {} tensors were there; alphas and gptq of their layers are not told again", writer.first(), writer.order().size()));
    MI_TRY_VOID(write(writer, -1, round_layer(mir_, rounded_.graph.prologue, -1, {}, o_.config, pool_), &progress));
    for (const ir::Block* b : {&mir_.graph.prologue, &mir_.graph.epilogue}) MI_TRY_VOID(check_finite(mir_, *b, -1, pool_));
    if (!set_.sequences.empty()) MI_TRY_VOID(embed());
    std::future<Status> writing;  // of a layer, while the next one is made
    for (int32_t layer = 0; layer < mir_.graph.info.layers; ++layer) {
      MI_TRY(RoundedLayer rounded, one_layer(layer, choice, writer));
      for (const ir::WeightDecl& d : mir_.graph.block_of(layer).weights) mir_.give_back(ir::full_name(d.name, layer));
      if (writing.valid()) MI_TRY_VOID(writing.get());
      writing = std::async(std::launch::async, [this, &writer, &progress, layer, rounded = std::move(rounded)] {
        return write(writer, layer, rounded, &progress);
      });
    }
    LayerPlan plan;
    if (choice.rounds_tied_head()) plan.sources[kHeadWeight] = kEmbeddingWeight;
    const RoundedLayer epilogue = round_layer(mir_, rounded_.graph.epilogue, -1, plan, o_.config, pool_);
    if (writing.valid()) MI_TRY_VOID(writing.get());
    MI_TRY_VOID(write(writer, -1, epilogue, &progress));
    progress.done();
    if (o_.compare) MI_TRY_VOID(compare_heads(epilogue));

    MI_TRY_VOID(ir::copy_tokenizer(o_.model, out.path()));
    MI_TRY_VOID(ir::copy_source_config(o_.model, out.path()));
    MI_TRY_VOID(write_file(out.path() / "recipe.yaml", recipe_text(recipe_of(o_), {"what made this model; with the same source it gives the same bytes"})));
    MI_TRY_VOID(writer.finish(rounded_.graph, provenance_of(o_, mir_, set_, report_)));
    const Status put = out.commit();
    if (put.ok() || put.error().code() == ErrorCode::kBadInput) kept_.remove();  // another run was faster: nothing goes on from here
    MI_TRY_VOID(put);
    return std::move(report_);
  }

 private:
  // The graph that will be written; no number is needed for it.
  Status declare(const Choice& choice) {
    rounded_.dir = mir_.dir;
    rounded_.files = mir_.files;
    rounded_.index = mir_.index;
    ir::Graph& g = rounded_.graph;
    g = mir_.graph;
    const bool rounds = o_.config.rounding != Rounding::kNone;
    if (choice.rounds_tied_head()) untie_head(g);
    if (rounds) MI_TRY_VOID(ir::to_quantized(g, [&](int32_t layer, const ir::WeightDecl& d) { return choice.format(layer, d); }));
    if (o_.config.smooth) {
      for (const ir::Block& b : mir_.graph.blocks) smooth_sites(b, o_.config.smooth_down, &report_.notes);
      // Smoothed tensors that are not rounded become F32: the factors are not exact in bf16.
      const std::set<std::string> touched = smoothed_tensors(mir_, choice, o_.config.smooth_down);
      for (ir::Block& b : g.blocks)
        for (ir::WeightDecl& d : b.weights)
          for (int32_t layer : b.layers)
            if (d.format == ir::WeightFormat::kFloat && touched.count(ir::full_name(d.name, layer)))
              d.dtype = DType::kF32;
    }
    MI_TRY(scales_, StoredScales::choose(o_.config, g));
    scales_.declare(g);
    report_.bytes_before = weights_bytes(mir_.graph);
    report_.bytes_after = weights_bytes(g);
    report_.formats = formats_of(g);
    return ir::verify(g);
  }

  Status load_text() {
    MI_TRY(set_, calibration_of(mir_, o_));
    report_.calibration_source = set_.source;
    report_.calibration_hash = set_.hash;
    if (set_.unused > 0)
      report_.notes.push_back(fmt::format("{} has more than calibration_samples: {}; {} were drawn from all of it, {} are left",
                                          set_.source, o_.config.calibration_samples, set_.sequences.size(), set_.unused));
    split_ = split(set_.sequences);
    if (!o_.compare) {
      split_.compared.clear();
    } else if (!o_.held_out.empty()) {
      MI_TRY(CalibrationSet text, other_text(mir_, o_, o_.held_out));
      split_.compared = std::move(text.sequences);
      split_.held_out = true;
      if (o_.compare_tokens > 0) keep_first(split_.compared, o_.compare_tokens);
      judge_held_out();
    }
    if (o_.compare_tokens > 0) keep_first(split_.compared, o_.compare_tokens);
    MI_TRY_VOID(look_at_mix());
    if (!capture_) split_.calibration.clear();
    report_.held_out = o_.compare && split_.held_out;
    report_.calibration_sequences = int64_t(split_.calibration.size());
    report_.calibration_tokens = token_count(split_.calibration);
    constexpr int64_t kFewTokens = 64;
    if (capture_ && report_.calibration_tokens < kFewTokens)
      warnings_.push_back(fmt::format("{} has only {} tokens to calibrate with: what is learnt from them says little", set_.source,
                                      report_.calibration_tokens));
    report_.warnings.insert(report_.warnings.end(), warnings_.begin(), warnings_.end());
    longest_ = std::max(longest_of(split_.calibration), longest_of(split_.compared));
    return {};
  }

  // Text that calibration saw is not held out: the comparison is kinder than it should be.
  void judge_held_out() {
    const std::set<std::vector<int32_t>> seen(split_.calibration.begin(), split_.calibration.end());
    const auto known = std::count_if(split_.compared.begin(), split_.compared.end(), [&](const auto& s) { return seen.count(s) != 0; });
    if (!capture_ || known == 0) return;
    split_.held_out = size_t(known) * 2 < split_.compared.size();
    warnings_.push_back(fmt::format("{} of the {} sequences of --held-out are calibration text too: the comparison flatters; give text that "
                                    "calibration has not seen",
                                    known, split_.compared.size()));
  }

  Status look_at_mix() {
    MI_TRY(const text::ModelText text, text::load_model_text(o_.model / "tokenizer"));
    if (!text.tokenizer) return {};
    const Mix mix = mix_of(set_.sequences, *text.tokenizer);
    report_.calibration_mix = mix_text(mix);
    if (o_.traffic.empty()) {
      report_.warnings = judge_mix(mix, nullptr);
      return {};
    }
    MI_TRY(const CalibrationSet traffic, other_text(mir_, o_, o_.traffic));
    const Mix real = mix_of(traffic.sequences, *text.tokenizer);
    report_.traffic_mix = mix_text(real);
    report_.warnings = judge_mix(mix, &real);
    return {};
  }

  Result<PieceEngine> piece(const ir::MirDir& whole, int32_t layer, int opt_level) {
    return PieceEngine::build(ir::piece_of(whole, layer), beside(o_.output, ".piece"), opt_level, longest_,
                              pool_);
  }

  Status embed() {
    MI_TRY(PieceEngine ends, piece(mir_, -1, 0));
    const size_t hidden = size_t(mir_.graph.info.hidden);
    rows_.calibration.resize(size_t(token_count(split_.calibration)) * hidden);
    rows_.compared.resize(size_t(token_count(split_.compared)) * hidden);
    ends.run_embedding(split_.calibration, rows_.calibration);
    ends.run_embedding(split_.compared, rows_.compared);
    rows_.rounded = rows_.compared;
    return {};
  }

  Result<RoundedLayer> one_layer(int32_t layer, const Choice& choice, const ir::MirWriter& writer) {
    MI_TRY_VOID(check_finite(mir_, mir_.graph.block_of(layer), layer, pool_));
    count(layer, choice);
    const bool there = layer_ends(layer, writer.order()) <= writer.first();
    if (there && set_.sequences.empty()) return RoundedLayer{};
    LayerPlan plan;
    LayerCapture seen;
    if (!set_.sequences.empty()) {
      MI_TRY(PieceEngine engine, piece(mir_, layer, capture_ ? 0 : 2));
      if (capture_ && there && !spread_) {
        engine.run_layer(split_.calibration, rows_.calibration, rows_.calibration);
      } else if (capture_ && !there) {
        const ir::Block& b = mir_.graph.block_of(layer);
        std::vector<float> before;
        if (o_.config.force_experts)
          before.assign(rows_.calibration.begin(), rows_.calibration.begin() + ptrdiff_t(std::min(rows_.calibration.size(), size_t(kForcedTokens * mir_.graph.info.hidden))));
        // Errors are spread best over what the layer will really be fed: the results of rounded layers before it.
        const std::span<float> through = spread_ ? std::span<float>() : std::span<float>(rows_.calibration);
        seen = capture_layer(engine, b, layer, split_.calibration, rows_.calibration, through, o_.config.gptq_tokens);
        plan.seen = &seen;
        if (const int64_t rare = note_rare_experts(seen, o_.config.min_expert_tokens, &report_);
            rare > 0 && o_.config.force_experts) {
          MI_TRY(seen.forced, show_all_experts(layer, before));
          report_.forced_experts += rare;
        }
      }
      if (o_.compare) engine.run_layer(split_.compared, rows_.compared, rows_.compared);
    }
    if (o_.config.smooth && !there) {
      plan.smoothing = plan_smoothing(mir_, mir_.graph.block_of(layer), choice, seen, o_.config, pool_, &report_.notes);
      if (!plan.smoothing.alpha.empty()) report_.alphas[layer] = plan.smoothing.alpha;
    }
    if (scales_.any() && !there) plan.constants = scales_.measure(seen, plan.smoothing, o_.config);
    RoundedLayer rounded;
    if (there) {
      MI_TRY_VOID(read_back(layer, writer, &rounded));
    } else {
      rounded = round_layer(mir_, rounded_.graph.block_of(layer), layer, plan, o_.config, pool_);
    }
    report_.spread_matrices += rounded.spread;
    if (rounded.alone > 0)
      report_.notes.push_back(fmt::format("layer {}: {} experts' matrices that calibration never reached are rounded to nearest",
                                          layer, rounded.alone));
    if (o_.compare || spread_) {
      rounded_.made = rounded.made;
      MI_TRY(PieceEngine engine, piece(rounded_, layer, 2));
      rounded_.made.clear();
      if (spread_) engine.run_layer(split_.calibration, rows_.calibration, rows_.calibration);
      if (!o_.compare) return rounded;
      engine.run_layer(split_.compared, rows_.rounded, rows_.rounded);
      report_.layers.push_back(deviation(layer, rows_.compared, rows_.rounded));
      report_.layers.back().weight_error = rounded.error.relative();
    }
    return rounded;
  }

  // What the recipe does to a layer, also to one that an earlier run has made.
  void count(int32_t layer, const Choice& choice) {
    const ir::Block& b = mir_.graph.block_of(layer);
    std::set<std::string> values;
    for (const MatrixUse& u : matrix_uses(b)) values.insert(u.value);
    for (const std::string& value : values) {
      report_.static_scales += scales_.is_static(layer, value);
      report_.saturated += scales_.saturates(layer, value);
    }
    if (o_.config.smooth) report_.smoothed_sites += smoothed_sites(mir_, b, layer, choice, o_.config.smooth_down);
  }

  // The first calibration tokens through every expert of the layer.
  Result<std::shared_ptr<const LayerCapture>> show_all_experts(int32_t layer, const std::vector<float>& rows) {
    Sequences first;
    for (int64_t left = int64_t(rows.size()) / mir_.graph.info.hidden; left > 0; left -= int64_t(first.back().size())) {
      const std::vector<int32_t>& ids = split_.calibration[first.size()];
      first.emplace_back(ids.begin(), ids.begin() + ptrdiff_t(std::min(left, int64_t(ids.size()))));
    }
    constexpr int64_t kStep = 32;  // a row per expert and token: few tokens at a time
    MI_TRY(PieceEngine engine, PieceEngine::build(with_all_experts(ir::piece_of(mir_, layer)), beside(o_.output, ".piece"), 0,
                                                  longest_, pool_, kStep));
    return std::make_shared<const LayerCapture>(
        capture_layer(engine, mir_.graph.block_of(layer), layer, first, rows, {}, kForcedTokens));
  }

  Status compare_heads(const RoundedLayer& epilogue) {
    MI_TRY(PieceEngine head, piece(mir_, -1, 2));
    rounded_.made = epilogue.made;
    MI_TRY(PieceEngine rounded_head, piece(rounded_, -1, 2));
    rounded_.made.clear();
    report_.predictions = compare_predictions(split_.compared, head, rows_.compared, rounded_head, rows_.rounded);
    return {};
  }

  // Equal for runs that write the same bytes: the source (its graph, provenance, and the files as they are), the recipe,
  // the calibration text.
  std::string key() const {
    std::string k = fmt::format("{}\n{}\n{}\n{}\n{}\n", version(), ir::print(mir_.graph), dump_json(mir_.provenance),
                                recipe_text(o_.config, {}), set_.hash);
    for (const auto& f : mir_.files) {
      std::error_code ec;
      const auto time = std::filesystem::last_write_time(f->file().path(), ec).time_since_epoch().count();
      k += fmt::format("{} {} {}\n", f->file().path().string(), f->file().bytes().size(), time);
    }
    return k + fmt::format("{}\n", split_.calibration.size());
  }

  // Where the layer's tensors end in the order of writing.
  static size_t layer_ends(int32_t layer, const std::vector<SafetensorsWriter::Decl>& order) {
    size_t end = 0;
    for (size_t i = 0; i < order.size(); ++i)
      if (layer_of(order[i].name) == layer) end = i + 1;
    return end;
  }

  // What an earlier run made of a layer.
  Status read_back(int32_t layer, const ir::MirWriter& writer, RoundedLayer* rounded) const {
    for (size_t i = 0; i < writer.first(); ++i) {
      if (layer_of(writer.order()[i].name) != layer) continue;
      MI_TRY(Tensor t, writer.kept_tensor(i));
      rounded->made[writer.order()[i].name] = std::make_shared<const Tensor>(std::move(t));
    }
    return {};
  }

  // The tensors of one layer, or of what stands before or behind the layers.
  Status write(ir::MirWriter& writer, int32_t layer, const RoundedLayer& rounded, Progress* progress) {
    const auto& order = writer.order();
    for (; place_ < order.size() && layer_of(order[place_].name) == layer; ++place_) {
      const std::string& name = order[place_].name;
      if (place_ < writer.first()) {
        if (mir_.has(name)) progress->advance(mir_.weight(name).bytes, "already there");
        continue;
      }
      const auto made = rounded.made.find(name);
      const TensorView v = made != rounded.made.end() ? made->second->view() : mir_.weight(name);
      MI_TRY_VOID(writer.write({v.data, v.bytes}));
      if (mir_.has(name)) progress->advance(mir_.weight(name).bytes, name);
      mir_.give_back(name);
    }
    return {};
  }

  const QuantizeOptions& o_;
  const ir::MirDir& mir_;
  hw::ThreadPool& pool_;
  QuantizeReport report_;
  ir::MirDir rounded_;  // the graph that is written, the source's files, and the tensors of the layer that is looked at
  StoredScales scales_;
  CalibrationSet set_;
  Split split_;
  Rows rows_;
  int64_t longest_ = 0;
  bool capture_ = false, spread_ = false;
  KeptFiles kept_;
  std::vector<std::string> warnings_;
  size_t place_ = 0;  // in the writer's order
};

}  // namespace

Result<QuantizeReport> quantize(const QuantizeOptions& o, hw::ThreadPool& pool) {
  if (needs_plan(o.config)) {
    QuantizeOptions planned = o;
    MI_TRY_VOID(check_output(o));
    MI_TRY(const Planned plan, plan_recipe(o, {}, pool));
    planned.config = plan.config;
    MI_TRY(QuantizeReport report, quantize(planned, pool));
    report.notes.insert(report.notes.begin(), plan.reasons.begin(), plan.reasons.end());
    return report;
  }
  MI_TRY(const ir::MirDir mir, ir::MirDir::open(o.model));
  return Walk(o, mir, pool).run();
}

std::string report_text(const QuantizeReport& r) {
  std::string s;
  s += r.calibration_tokens == 0    ? std::string("calibration   not needed by this recipe\n")
                                    : fmt::format("calibration   {}: {} sequences, {} tokens\n", r.calibration_source,
                                                  r.calibration_sequences, r.calibration_tokens);
  if (!r.calibration_mix.empty()) s += fmt::format("made of       {}\n", r.calibration_mix);
  if (!r.traffic_mix.empty()) s += fmt::format("traffic       {}\n", r.traffic_mix);
  for (const std::string& w : r.warnings) s += fmt::format("warning       {}\n", w);
  // A search names every part; then the counts say it shorter.
  constexpr size_t kManyPatterns = 12;
  std::map<std::string, int64_t> by_format;
  for (const Choice::Count& c : r.chosen) by_format[layer_format_name(c.format)] += c.matches;
  if (r.chosen.size() > kManyPatterns)
    for (const auto& [format, matches] : by_format) s += fmt::format("recipe        {}: {} matrices\n", format, matches);
  else
    for (const Choice::Count& c : r.chosen)
      s += fmt::format("{:<13} '{}' matches {}\n", layer_format_name(c.format), c.pattern, c.matches);
  s += "matrices      ";
  for (const auto& [format, n] : r.formats) s += fmt::format("{} {}, ", n, format);
  s += fmt::format("{} kept in float by the recipe, {} values smoothed\n", r.float_matrices, r.smoothed_sites);
  s += fmt::format("weights       {} -> {}\n", human_bytes(double(r.bytes_before)), human_bytes(double(r.bytes_after)));
  if (r.spread_matrices > 0) s += fmt::format("gptq          {} matrices, experts counted one by one\n", r.spread_matrices);
  if (r.static_scales > 0) s += fmt::format("activations   {} static scales\n", r.static_scales);
  if (r.saturated > 0) s += fmt::format("activations   {} inputs whose scales per token saturate\n", r.saturated);
  for (const auto& [layer, sites] : r.alphas)
    for (const auto& [value, alpha] : sites) s += fmt::format("alpha         layer {} {}: {:.2f}\n", layer, value, alpha);
  for (const std::string& n : r.notes) s += fmt::format("note          {}\n", n);
  if (r.layers.empty()) return s;
  s += fmt::format("\nagainst the float model, {} {} tokens: mean KL {:.5f}, largest {:.5f}, same best token {:.2f} %, perplexity "
                   "{:.4f} -> {:.4f} ({:+.2f} %{})\n",
                   r.predictions.tokens, r.held_out ? "held-out" : "calibration", r.predictions.mean_kl,
                   r.predictions.max_kl, 100 * r.predictions.top1_agreement, std::exp(r.predictions.nll),
                   std::exp(r.predictions.rounded_nll),
                   100 * (std::exp(r.predictions.rounded_nll - r.predictions.nll) - 1),
                   r.predictions.nll_error > 0 ? fmt::format(", standard error {:.2f}", 100 * r.predictions.nll_error * std::exp(r.predictions.rounded_nll - r.predictions.nll)) : "");
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
  j["calibration"]["mix"] = r.calibration_mix;
  j["calibration"]["traffic_mix"] = r.traffic_mix;
  j["calibration"]["forced_experts"] = r.forced_experts;
  j["warnings"] = r.warnings;
  j["formats"] = r.formats;
  j["float_matrices"] = r.float_matrices;
  j["smoothed_sites"] = r.smoothed_sites;
  j["bytes_before"] = r.bytes_before;
  j["bytes_after"] = r.bytes_after;
  j["notes"] = r.notes;
  j["patterns"] = Json::array();
  for (const Choice::Count& c : r.chosen)
    j["patterns"].push_back({{"pattern", c.pattern}, {"format", layer_format_name(c.format)}, {"matches", c.matches}});
  j["spread_matrices"] = r.spread_matrices;
  j["static_scales"] = r.static_scales;
  j["saturated"] = r.saturated;
  j["alphas"] = Json::object();
  for (const auto& [layer, sites] : r.alphas)
    for (const auto& [value, alpha] : sites) j["alphas"][std::to_string(layer)][value] = alpha;
  j["compared_tokens"] = r.predictions.tokens;
  if (r.predictions.tokens > 0) {
    j["held_out"] = r.held_out;
    j["mean_kl"] = r.predictions.mean_kl;
    j["max_kl"] = r.predictions.max_kl;
    j["top1_agreement"] = r.predictions.top1_agreement;
    j["nll"] = r.predictions.nll;
    j["rounded_nll"] = r.predictions.rounded_nll;
    j["nll_error"] = r.predictions.nll_error;
  }
  j["layers"] = Json::array();
  for (const LayerDeviation& d : r.layers)
    j["layers"].push_back(
        {{"layer", d.layer}, {"relative_rms", d.relative_rms}, {"cosine", d.cosine}, {"weight_error", d.weight_error}});
  return j;
}

}  // namespace mi::quant
