// quantize() as a whole on a tiny model: the same bytes however it is run, recipes that repeat a run, damaged numbers.
#include "quant/quantize.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "quant/plan.h"
#include "quant/search.h"
#include "quant/sensitivity.h"
#include "quant/testing.h"
#include "tensor/dtype.h"

namespace mi::quant {
namespace {

using ::testing::HasSubstr;
using testing::files_of;
using testing::random_ids;
using testing::recipe;
using testing::write_tiny;

constexpr const char* kText = "calibration_samples: 24, calibration_length: 32";

struct QuantizeTest : ::testing::Test {
  TempDir dir;
  Path mir = write_tiny(dir.path());
  int runs = 0;

  // 40 sequences, which text.jsonl holds, too.
  Sequences written_ids() {
    std::ofstream text(dir / "text.jsonl");
    const Sequences s = random_ids(std::vector<int64_t>(40, 32), 50);
    for (const auto& ids : s) text << "{\"ids\": " << Json(ids).dump() << "}\n";
    return s;
  }
  QuantizeOptions options(const QuantConfig& c) {
    QuantizeOptions o;
    o.model = mir;
    o.output = dir / ("out" + std::to_string(runs++));
    o.config = c;
    return o;
  }
  QuantizeReport quantized(const QuantizeOptions& o, int threads = 2) {
    hw::ThreadPool pool(threads);
    auto r = quantize(o, pool);
    EXPECT_TRUE(r.ok()) << (r.ok() ? "" : r.error().message());
    return r.ok() ? *r : QuantizeReport{};
  }
  std::string refused(const QuantConfig& c) {
    hw::ThreadPool pool(2);
    const QuantizeOptions o = options(c);
    const auto r = quantize(o, pool);
    EXPECT_FALSE(std::filesystem::exists(o.output));
    return r.ok() ? "accepted" : r.error().message();
  }
};

const char* const kRecipes[] = {
    "",
    "smooth_quant: {enable: false}",
    "weight_scheme: per_tensor, activation_scheme: per_tensor, observer: mse",
    "activation_scheme: per_tensor, observer: percentile, percentile: 99, activations: {\"re:.*down\": per_token}",
    "activations: {\"re:.*moe.*\": per_tensor}, saturation: {percentile: 99, layers: [\"re:.*down\", layers.1.attn]}, smooth_quant: {down: true}",
    "weight_bits: 4, group_size: 32, smooth_quant: {alpha: search, down: true}",
    "weight_bits: 4, group_size: 64, rounding: nearest",
    "rounding: gptq, gptq: {damping: 0.02, tokens: 200}, smooth_quant: {alpha: 0.5, down: true, layers: {1: 0.7}}",
    "rounding: none, smooth_quant: {down: true}",
    "rounding: gptq, smooth_quant: {down: true}, coverage: {min_tokens: 300, force: true}",
    "layers: {\"re:.*experts\": int4_g32, lm_head: int8, layers.0.attn: float}, sensitive_layers: [layers.2.attn.o]",
};

TEST_F(QuantizeTest, TheSameBytesHoweverItIsRun) {
  for (const char* yaml : kRecipes) {
    SCOPED_TRACE(yaml);
    const QuantConfig c = recipe(std::string(kText) + (*yaml ? ", " : "") + yaml);
    const QuantizeOptions first = options(c);
    const QuantizeReport report = quantized(first, 1);
    EXPECT_EQ(report.layers.size(), 3u);
    EXPECT_GT(report.predictions.scored, 0);
    const auto files = files_of(first.output);
    EXPECT_TRUE(files.count("model.mir") && files.count("recipe.yaml") && files.count("provenance.json"));
    for (const int threads : {2, 3}) {
      const QuantizeOptions again = options(c);
      quantized(again, threads);
      EXPECT_EQ(files_of(again.output), files) << threads << " threads";
    }
    // What is compared, and whether, is no part of the recipe.
    QuantizeOptions alone = options(c), little = options(c);
    alone.compare = false;
    little.compare_tokens = 40;
    EXPECT_TRUE(quantized(alone).layers.empty());
    EXPECT_EQ(files_of(alone.output), files) << "without a comparison";
    quantized(little);
    EXPECT_EQ(files_of(little.output), files) << "with another comparison";
    // The recipe in the output repeats it.
    const auto written = load_quant_config(first.output / "recipe.yaml");
    ASSERT_TRUE(written.ok()) << written.error().message();
    const QuantizeOptions repeated = options(*written);
    quantized(repeated);
    EXPECT_EQ(files_of(repeated.output), files) << "from its recipe";
    // Nothing is left beside the outputs.
    for (const auto& e : std::filesystem::directory_iterator(dir.path()))
      EXPECT_TRUE(e.path().filename() == "mir" || e.path().filename().string().starts_with("out")) << e.path();
  }
}

TEST_F(QuantizeTest, TheRecipeNamesTheTextFromAnywhere) {
  std::filesystem::create_directories(dir / "texts");
  std::ofstream text(dir / "texts" / "calib.jsonl");
  for (const auto& ids : random_ids(std::vector<int64_t>(16, 20), 50)) text << "{\"ids\": " << Json(ids).dump() << "}\n";
  text.close();
  std::ofstream(dir / "texts" / "r.yaml") << "quant: {rounding: gptq, calibration_data: calib.jsonl}\n";
  const QuantConfig c = load_quant_config(dir / "texts" / "r.yaml").value();
  const QuantizeOptions by_recipe = options(c);
  EXPECT_EQ(quantized(by_recipe).calibration_source, "calib.jsonl");
  QuantizeOptions by_flag = options(recipe("rounding: gptq"));
  by_flag.calibration = dir / "texts" / ".." / "texts" / "calib.jsonl";
  quantized(by_flag);
  EXPECT_EQ(files_of(by_flag.output), files_of(by_recipe.output));
  const QuantizeOptions again = options(load_quant_config(by_flag.output / "recipe.yaml").value());
  quantized(again);
  EXPECT_EQ(files_of(again.output), files_of(by_flag.output));
}

TEST_F(QuantizeTest, AutomaticAnswersAreWrittenDown) {
  const QuantizeOptions o = options(recipe(std::string(kText) + ", activation_scheme: auto, sensitive_layers: auto, bound: 0.0005"));
  const QuantizeReport report = quantized(o);
  EXPECT_FALSE(report.notes.empty());
  const QuantConfig written = load_quant_config(o.output / "recipe.yaml").value();
  EXPECT_FALSE(needs_plan(written));
  EXPECT_FALSE(written.sensitive_layers.empty());
  const QuantizeOptions again = options(written);
  quantized(again);
  EXPECT_EQ(files_of(again.output), files_of(o.output));
}

TEST_F(QuantizeTest, SaturationIsStoredAndRuns) {
  const QuantizeOptions plain = options(recipe(kText)), o = options(recipe(std::string(kText) + ", saturation: {percentile: 90, layers: [\"re:.*down\"]}"));
  const QuantizeReport without = quantized(plain), with = quantized(o);
  EXPECT_EQ(without.saturated, 0);
  EXPECT_EQ(with.saturated, 3);  // h of three layers
  EXPECT_EQ(with.static_scales, 0);
  EXPECT_THAT(report_text(with), HasSubstr("3 inputs whose scales per token saturate"));
  EXPECT_EQ(report_json(with)["saturated"], 3);
  // Cutting a tenth of all numbers is seen in every layer.
  for (size_t i = 0; i < 3; ++i) EXPECT_NE(with.layers[i].relative_rms, without.layers[i].relative_rms);
  EXPECT_GT(with.predictions.mean_kl, without.predictions.mean_kl);

  const ir::MirDir m = ir::MirDir::open(o.output).value();
  int64_t saturating = 0;
  for (const ir::Block& b : m.graph.blocks)
    for (const ir::Node& n : b.nodes)
      if (n.op == Op::kQuantize) saturating += std::get<QuantizeParams>(n.params).saturate ? int64_t(b.layers.size()) : 0;
  EXPECT_EQ(saturating, 3);
  for (int layer = 0; layer < 3; ++layer) EXPECT_GT(to_f32_vector(m.weight("layers." + std::to_string(layer) + ".act.h.scale"))[0], 0);
}

// The input of layer 1's down has a large channel (of twenty: 5 % of its numbers) that hardly anything reads: a scale that holds
// it loses the rest. Everywhere else cutting 5 % costs more than it saves.
TEST_F(QuantizeTest, AutomaticSaturationFindsTheStubbornInput) {
  constexpr size_t kChannel = 5, kHidden = 24, kInner = 20;
  mir = write_tiny(dir.path(), "f32", [&](const std::string& name, std::vector<float>& v) {
    for (size_t e = 0; e < 6; ++e) {
      if (name == "layers.1.moe.experts.up.weight")
        for (size_t i = 0; i < kHidden; ++i) v[(e * kInner + kChannel) * kHidden + i] *= 300;
      if (name == "layers.1.moe.experts.down.weight")
        for (size_t i = 0; i < kHidden; ++i) v[(e * kHidden + i) * kInner + kChannel] *= 1e-6f;
    }
  });
  const QuantizeOptions o = options(recipe(std::string(kText) + ", smooth_quant: {enable: false}, saturation: {percentile: 94.9, layers: auto}"));
  const QuantizeReport r = quantized(o);
  EXPECT_EQ(r.saturated, 1);
  EXPECT_THAT(r.notes, ::testing::Contains(HasSubstr("layers.1.h saturates")));
  EXPECT_THAT(r.notes, ::testing::Contains(HasSubstr("helps 1 of 12 inputs")));
  const std::string written = read_file(o.output / "recipe.yaml").value();
  EXPECT_THAT(written, HasSubstr("- \"layers.1.moe.experts.down\""));
  EXPECT_THAT(written, ::testing::Not(HasSubstr("layers: auto")));
  QuantizeOptions again = options(load_quant_config(o.output / "recipe.yaml").value());
  quantized(again);
  EXPECT_EQ(files_of(again.output), files_of(o.output));
  // And it is better for it.
  const QuantizeReport plain = quantized(options(recipe(std::string(kText) + ", smooth_quant: {enable: false}")));
  EXPECT_LT(r.predictions.mean_kl, plain.predictions.mean_kl);
}

// Inputs that are correlated, as in a trained model: compensation must pay in every layer's output.
TEST_F(QuantizeTest, SpreadErrorsHurtLess) {
  double errors[2] = {};
  for (const bool spread : {false, true}) {
    const QuantizeReport r = quantized(options(recipe("calibration_samples: 64, calibration_length: 64, weight_bits: 4, group_size: 32, smooth_quant: {enable: false}, rounding: " +
                                                      std::string(spread ? "gptq" : "nearest"))));
    for (const LayerDeviation& d : r.layers) errors[spread] += d.relative_rms;
    // dense: q k v o gate_up down; moe, twice: q k v o and three matrices of six experts
    EXPECT_EQ(r.spread_matrices, spread ? 6 + 2 * (4 + 3 * 6) : 0);
  }
  EXPECT_LT(errors[1], 0.95 * errors[0]);
}

TEST_F(QuantizeTest, RoundingNoneRoundsNothing) {
  const QuantizeOptions o = options(recipe(std::string(kText) + ", rounding: none, smooth_quant: {down: true}"));
  const QuantizeReport r = quantized(o);
  EXPECT_TRUE(r.formats.empty());
  EXPECT_LT(r.predictions.mean_kl, 1e-6);
  EXPECT_EQ(r.predictions.top1_agreement, 1);
  for (const auto& d : ir::declared_tensors(ir::MirDir::open(o.output)->graph)) EXPECT_NE(d.dtype, DType::kI8) << d.name;
}

TEST_F(QuantizeTest, ForcedExpertsAreAllReached) {
  const std::string yaml = "calibration_samples: 1, calibration_length: 1, rounding: gptq, coverage: {force: %}";
  const auto with = [&](const char* force) { return quantized(options(recipe(std::string(yaml).replace(yaml.find('%'), 1, force)))); };
  const QuantizeReport seldom = with("false"), forced = with("true");
  EXPECT_EQ(seldom.spread_matrices, 6 + 2 * (4 + 3 * 2));  // one token reaches two experts of six
  EXPECT_EQ(forced.spread_matrices, 6 + 2 * (4 + 3 * 6));
  EXPECT_EQ(forced.forced_experts, 2 * 6);  // two of them had less than min_tokens, too
}

TEST_F(QuantizeTest, RoundingAutoSpreadsInt4Only) {
  const auto spread = [&](const std::string& yaml) { return quantized(options(recipe(std::string(kText) + ", " + yaml))).spread_matrices; };
  EXPECT_EQ(spread("layers: {layers.0.attn: int4_g32}"), 4);
  EXPECT_EQ(spread("rounding: nearest, layers: {layers.0.attn: int4_g32}"), 0);
  EXPECT_EQ(spread("rounding: auto"), 0);
}

struct DamagedTest : QuantizeTest, ::testing::WithParamInterface<float> {};

TEST_P(DamagedTest, IsNamedByLayerExpertAndPlace) {
  const TempDir other;
  mir = write_tiny(other.path(), "bf16", [](const std::string& name, std::vector<float>& v) {
    if (name == "layers.2.moe.experts.up.weight") v[size_t(4 * 20 * 24 + 3 * 24 + 7)] = GetParam();
  });
  for (const char* yaml : {"", "smooth_quant: {enable: false}", "weight_bits: 4, group_size: 32"}) {
    const std::string message = refused(recipe(std::string(kText) + (*yaml ? ", " : "") + yaml));
    EXPECT_THAT(message, HasSubstr("layers.2.moe.experts.up.weight"));
    EXPECT_THAT(message, HasSubstr("expert 4, row 3, column 7"));
    EXPECT_THAT(message, HasSubstr("export it again"));
  }
  QuantizeOptions o = options(recipe(kText));
  PlanOptions p;
  hw::ThreadPool pool(2);
  const auto plan = plan_recipe(o, p, pool);
  ASSERT_FALSE(plan.ok());
  EXPECT_THAT(plan.error().message(), HasSubstr("layers.2.moe.experts.up.weight"));
  const auto engine = build_temporary_engine(mir, dir / "engine", 2, "");
  ASSERT_FALSE(engine.ok());
  EXPECT_THAT(engine.error().message(), HasSubstr("layers.2.moe.experts.up.weight"));
  EXPECT_THAT(engine.error().message(), HasSubstr("expert 4, row 3, column 7"));
}
INSTANTIATE_TEST_SUITE_P(All, DamagedTest, ::testing::Values(std::nanf(""), INFINITY, -INFINITY));

TEST_F(QuantizeTest, DamageBesideTheLayersIsNamed) {
  for (const char* bad : {"embed.weight", "norm.weight", "lm_head.weight"}) {
    const TempDir other;
    mir = write_tiny(other.path(), "bf16", [&](const std::string& name, std::vector<float>& v) {
      if (name == bad) v[5] = NAN;
    });
    EXPECT_THAT(refused(recipe(kText)), HasSubstr(std::string("'") + bad + "'"));
  }
}

// ---- sensitivity

constexpr int64_t kLong = 600;

// A channel that only the embedding of token 1 has; layer 2's norm makes it 300 times as large.
Path write_massive(const Path& folder) {
  return write_tiny(folder, "f32", [](const std::string& name, std::vector<float>& v) {
    constexpr size_t kChannel = 5, kHidden = 24;
    if (name == "embed.weight")
      for (size_t t = 0; t < v.size() / kHidden; ++t) v[t * kHidden + kChannel] = t == 1 ? 2000.0f : 0.0f;
    if (name.ends_with("attn.o.weight"))
      std::fill(v.begin() + kChannel * 32, v.begin() + (kChannel + 1) * 32, 0.0f);
    if (name.ends_with("mlp.down.weight"))
      std::fill(v.begin() + kChannel * 40, v.begin() + (kChannel + 1) * 40, 0.0f);
    if (name.ends_with("experts.down.weight"))
      for (size_t e = 0; e < 6; ++e) std::fill_n(v.begin() + ptrdiff_t((e * kHidden + kChannel) * 20), 20, 0.0f);
    if (name == "layers.2.attn.norm.weight") v[kChannel] *= 300;
  }, [](std::string text) { return text.replace(text.find("max_positions = 128"), 19, "max_positions = 4096"); });
}

Sequences with_first_token(int32_t first) {
  Sequences s = random_ids(std::vector<int64_t>(4, kLong), 48);
  for (auto& ids : s) {
    for (int32_t& id : ids) id += 2;  // never 0 or 1
    ids[0] = first;
  }
  return s;
}

Sensitivity sensitivity(const Path& mir, const Sequences& s, const Path& scratch, int threads = 2, bool activations = false) {
  SensitivityOptions o;
  o.config = recipe("");
  o.scratch = scratch;
  o.activations = activations;
  o.formats = {LayerFormat::kInt8, LayerFormat::kInt4G128, LayerFormat::kInt4G32};
  hw::ThreadPool pool(threads);
  auto r = measure_sensitivity(ir::MirDir::open(mir).value(), s, o, pool);
  EXPECT_TRUE(r.ok()) << (r.ok() ? "" : r.error().message());
  return r.ok() ? *r : Sensitivity{};
}

TEST_F(QuantizeTest, AMassiveActivationAtTheFirstPositionIsNamedFirst) {
  const TempDir other;
  const Path massive = write_massive(other.path());
  const Sensitivity with = sensitivity(massive, with_first_token(1), dir / "piece");
  ASSERT_FALSE(with.peaks.empty());
  EXPECT_EQ(with.peaks[0].layer, 2);
  EXPECT_EQ(with.peaks[0].value, "n");
  EXPECT_TRUE(with.peaks[0].massive());
  EXPECT_LE(with.peaks[0].token_share_permille, 2);  // one row of six hundred
  ASSERT_EQ(with.order().size(), 3u);
  EXPECT_EQ(with.order()[0], 2);
  const std::string text = sensitivity_text(with);
  EXPECT_THAT(text, HasSubstr("massive activations: layer 2 n"));
  EXPECT_LT(text.find("layers.2.attn"), text.find("layers.0.attn"));
  EXPECT_EQ(sensitivity_json(with)["order"][0], 2);

  const Sensitivity without = sensitivity(massive, with_first_token(2), dir / "piece");
  for (const Peak& p : without.peaks) EXPECT_FALSE(p.massive()) << p.layer << " " << p.value;
  EXPECT_THAT(sensitivity_text(without), ::testing::Not(HasSubstr("massive")));
}

// rows x cols of noise of that rms.
std::vector<float> noise(int64_t rows, int64_t cols, double rms, uint64_t seed) {
  std::vector<float> v(size_t(rows * cols));
  for (size_t i = 0; i < v.size(); ++i) v[i] = float(rms * std::sqrt(3.0) * (2 * random_unit(seed, i) - 1));
  return v;
}

TEST(PeakTest, OneChannelAtOnePositionIsMassive) {
  constexpr int64_t kRows = 500, kCols = 64;
  for (const float sign : {1.0f, -1.0f}) {
    std::vector<float> v = noise(kRows, kCols, 1, 1);
    v[17] = sign * 2000;
    const Peak p = peak_of(3, "h", v, kCols);
    EXPECT_TRUE(p.massive());
    EXPECT_EQ(p.largest, 2000);
    EXPECT_EQ(p.token_share_permille, 2);
    EXPECT_NEAR(p.median, 0.87, 0.05);
    v[17] = sign * 700;  // large, and not far enough from the others
    EXPECT_FALSE(peak_of(3, "h", v, kCols).massive());
    for (float& x : v) x *= 0.01f;
    v[17] = sign * 90;  // far, and not large
    EXPECT_FALSE(peak_of(3, "h", v, kCols).massive());
  }
}

TEST(PeakTest, GatedActivationsAreNotMassive) {
  constexpr int64_t kRows = 2000, kCols = 64;
  // silu(g) * u with a few strong channels in many tokens: most numbers are near zero, so the largest is far above median and rms.
  const std::vector<float> g = noise(kRows, kCols, 1, 1), u = noise(kRows, kCols, 1, 2);
  std::vector<float> v(g.size());
  for (size_t i = 0; i < v.size(); ++i) {
    const float gate = g[i] * (random_unit(3, i) < 0.01 ? 12 : 1) - 3;
    v[i] = 20 * gate / (1 + std::exp(-gate)) * u[i];
  }
  const Peak p = peak_of(0, "h", v, kCols);
  EXPECT_GT(p.largest, kMassiveLargest);
  EXPECT_GT(p.largest, 100 * p.median);
  EXPECT_FALSE(p.massive());
  for (float& x : v) x = std::fabs(x) < 10 ? 0.001f * x : x;  // even where the median is next to nothing
  EXPECT_GT(peak_of(0, "h", v, kCols).largest, kMassiveToMedian * peak_of(0, "h", v, kCols).median);
  EXPECT_FALSE(peak_of(0, "h", v, kCols).massive());
}

TEST(PeakTest, AChannelThatEveryTokenHasIsAnOutlierAndNotMassive) {
  constexpr int64_t kRows = 100, kCols = 64;
  std::vector<float> v = noise(kRows, kCols, 0.1, 1);
  for (int64_t r = 0; r < kRows; ++r) v[size_t(r * kCols + 5)] = 300;
  const Peak p = peak_of(0, "n", v, kCols);
  EXPECT_GT(p.largest, kMassiveToMedian * p.median);
  EXPECT_EQ(p.token_share_permille, 1000);
  EXPECT_FALSE(p.massive());
  EXPECT_FALSE(peak_of(0, "n", {}, kCols).massive());
  EXPECT_FALSE(peak_of(0, "n", std::vector<float>(kCols), kCols).massive());
}

TEST_F(QuantizeTest, SensitivityOfEveryPart) {
  const Sequences s = random_ids(std::vector<int64_t>(30, 40), 50);
  const Sensitivity a = sensitivity(mir, s, dir / "piece", 1, true);
  EXPECT_EQ(a.units.size(), 6u);
  EXPECT_EQ(a.tokens, 512);
  for (const Unit& u : a.units) {
    for (const LayerFormat f : {LayerFormat::kInt8, LayerFormat::kInt4G128, LayerFormat::kInt4G32}) {
      const Candidate* c = a.find(u.name, f);
      ASSERT_NE(c, nullptr) << u.name;
      EXPECT_EQ(c->layer, u.layer);
      EXPECT_EQ(c->measured, f != LayerFormat::kInt4G128);
      EXPECT_GT(c->error, 0);
      EXPECT_GT(c->kl, 0);
      EXPECT_GT(c->cosine, 0.8);
    }
    EXPECT_LT(a.find(u.name, LayerFormat::kInt8)->kl, a.find(u.name, LayerFormat::kInt4G32)->kl) << u.name;
    EXPECT_LT(a.find(u.name, LayerFormat::kInt8)->error, 0.3 * a.find(u.name, LayerFormat::kInt4G32)->error) << u.name;
  }
  int64_t scales = 0;
  for (const Candidate& c : a.candidates) scales += c.static_scale;
  EXPECT_EQ(scales, 3 * 4);  // n, o, m, h of each layer
  const Sensitivity b = sensitivity(mir, s, dir / "piece", 3, true);
  EXPECT_EQ(sensitivity_json(a), sensitivity_json(b));
  EXPECT_FALSE(std::filesystem::exists(dir / "piece"));
}

// The KL of a part alone is what quantize reports when only this part is rounded.
TEST_F(QuantizeTest, SensitivityAgreesWithTheRealThing) {
  const Sequences s = written_ids();
  const Sensitivity a = sensitivity(mir, s, dir / "piece");
  for (const char* part : {"layers.0.attn", "layers.1.moe.experts"}) {
    QuantizeOptions o = options(recipe(std::string("layers: {\"re:.*\": float, ") + part + ": int4_g32}"));
    o.calibration = dir / "text.jsonl";
    o.held_out = o.calibration;
    o.compare_tokens = 0;
    const double kl = quantized(o).predictions.mean_kl;
    EXPECT_NEAR(a.find(part, LayerFormat::kInt4G32)->kl / kl, 1, 0.5) << part;
  }
}

// ... and so is that of all of them together.
TEST_F(QuantizeTest, JointKlIsThatOfTheWholeModel) {
  const Sequences s = written_ids();
  const Sensitivity a = sensitivity(mir, s, dir / "piece");
  ASSERT_EQ(a.joint.size(), 2u);
  for (const Joint& j : a.joint) {
    QuantizeOptions o = options(recipe(std::string("layers: {\"re:layers.*\": ") + layer_format_name(j.format) + "}"));
    o.calibration = dir / "text.jsonl";
    o.held_out = o.calibration;
    o.compare_tokens = 0;
    EXPECT_NEAR(j.kl / quantized(o).predictions.mean_kl, 1, 0.5) << layer_format_name(j.format);
    double sum = 0;
    for (const Unit& u : a.units) sum += a.find(u.name, j.format)->kl;
    EXPECT_NEAR(j.sum, sum, 1e-12);
  }
}

TEST_F(QuantizeTest, SensitivityTakesEachLayersOwnAlpha) {
  const ir::MirDir m = ir::MirDir::open(mir).value();
  const Sequences s = random_ids(std::vector<int64_t>(20, 32), 50);
  const auto errors = [&](const char* smooth) {
    SensitivityOptions o;
    o.config = recipe(fmt::format("smooth_quant: {}", smooth));
    o.formats = o.measured = {LayerFormat::kInt8};
    o.sample_tokens = 128;
    o.scratch = dir / "piece";
    hw::ThreadPool pool(2);
    std::map<int32_t, std::vector<double>> e;
    const auto found = measure_sensitivity(m, s, o, pool);
    EXPECT_TRUE(found.ok());
    for (const Candidate& c : found->candidates) e[c.layer].push_back(c.error);
    return e;
  };
  auto low = errors("{alpha: 0.3}"), high = errors("{alpha: 0.8}"), mixed = errors("{alpha: 0.3, layers: {1: 0.8}}");
  EXPECT_NE(low[0], high[0]);
  EXPECT_NE(low[1], high[1]);
  EXPECT_EQ(mixed[0], low[0]);
  EXPECT_EQ(mixed[1], high[1]);
  EXPECT_EQ(mixed[2], low[2]);
}

TEST_F(QuantizeTest, ARoundedModelHasNoSensitivity) {
  const TempDir other;
  hw::ThreadPool pool(1);
  SensitivityOptions o;
  o.scratch = dir / "piece";
  const auto r = measure_sensitivity(ir::MirDir::open(write_tiny(other.path(), "w8a8")).value(), random_ids({20}, 50), o, pool);
  ASSERT_FALSE(r.ok());
  EXPECT_THAT(r.error().message(), HasSubstr("float"));
}

// ---- the search

TEST_F(QuantizeTest, ASearchStaysWithinItsLimitsAndRepeats) {
  const QuantConfig c = recipe("calibration_samples: 48, calibration_length: 32");
  PlanOptions p;
  p.sample_tokens = 256;
  p.limits.max_kl = 0.02;
  hw::ThreadPool pool(2);
  const QuantizeOptions o = options(c);
  const auto s = quantize_searched(o, p, {}, pool);
  ASSERT_TRUE(s.ok()) << s.error().message();
  EXPECT_GE(s->tries, 1);
  EXPECT_LE(s->plan.picked->kl, 0.02);
  EXPECT_EQ(s->plan.config.layers.size(), 6u);
  const QuantizeOptions again = options(load_quant_config(o.output / "recipe.yaml").value());
  quantized(again);
  EXPECT_EQ(files_of(again.output), files_of(o.output));
}

TEST_F(QuantizeTest, ASearchSaysWhatTheAutosFoundToo) {
  PlanOptions p;
  p.search = true;
  p.sample_tokens = 128;
  hw::ThreadPool pool(2);
  const auto plan = plan_recipe(options(recipe(std::string(kText) + ", saturation: {layers: auto}, sensitive_layers: auto")), p, pool);
  ASSERT_TRUE(plan.ok()) << plan.error().message();
  EXPECT_THAT(plan->reasons, Contains(HasSubstr("saturation at the")));
  EXPECT_THAT(plan->reasons, Contains(HasSubstr("layers.0.attn ")));
  EXPECT_EQ(plan->reasons.size(), plan->found.size() + plan->sensitivity.units.size());
  EXPECT_TRUE(plan->config.sensitive_layers.empty());  // the search has a format for every part
}

TEST_F(QuantizeTest, TheUsersOwnWordIsTheLast) {
  PlanOptions p;
  p.sample_tokens = 128;
  p.limits.max_bits = 6;
  hw::ThreadPool pool(2);
  const QuantizeOptions o = options(recipe(std::string(kText) + ", layers: {layers.1.moe.experts.down: float}"));
  const auto s = quantize_searched(o, p, {}, pool);
  ASSERT_TRUE(s.ok()) << s.error().message();
  EXPECT_LE(s->plan.picked->expert_bits, 6);
  const ir::MirDir out = ir::MirDir::open(o.output).value();
  EXPECT_EQ(out.weight("layers.1.moe.experts.down.weight").dtype, DType::kBF16);  // as it was
  EXPECT_EQ(out.weight("layers.2.moe.experts.down.weight").dtype, DType::kU8);
}

}  // namespace
}  // namespace mi::quant
