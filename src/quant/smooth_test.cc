// Smoothing does not change what a float model computes, whatever it smooths.
#include "quant/smooth.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "ir/edit.h"
#include "quant/rewrite.h"
#include "quant/testing.h"

namespace mi::quant {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::random_ids;
using testing::recipe;
using testing::write_tiny;

constexpr int64_t kHidden = 24, kExperts = 6, kInner = 20;

struct Outputs {
  std::vector<float> logits;
  std::vector<int32_t> experts;
};
Outputs run(const ir::MirDir& mir, const Path& beside, const Sequences& s, hw::ThreadPool& pool) {
  const auto files = build_temporary_engine(mir, beside, 0, "fp32");
  EXPECT_TRUE(files.ok()) << (files.ok() ? "" : files.error().message());
  exec::LoadOptions o;
  o.kv_type = "f32";
  const auto engine = exec::Engine::load(files->path(), o, pool).value();
  Outputs out;
  exec::Tap tap;
  tap.want = [](const artifact::Instr& i, bool input) { return !input && i.op == Op::kRoute; };
  tap.see = [&](const exec::TapEvent& e) { out.experts.insert(out.experts.end(), e.ids, e.ids + e.rows * e.cols); };
  engine->set_tap(&tap);
  std::vector<int32_t> pages(64);
  std::iota(pages.begin(), pages.end(), 0);
  for (const auto& ids : s) {
    const std::span<const float> l = engine->run({{{ids, 0, pages, 0}}});
    out.logits.insert(out.logits.end(), l.begin(), l.end());
  }
  return out;
}

// What smoothing made of every layer, on top of the float model; nothing is rounded.
struct SmoothedModel {
  ir::MirDir mir;
  std::vector<LayerSmoothing> layers;
  std::vector<std::string> notes;
};
SmoothedModel smooth(const ir::MirDir& mir, const QuantConfig& c, const Path& beside, const Sequences& s, hw::ThreadPool& pool) {
  SmoothedModel out;
  const Choice choice = Choice::make(c, mir.graph, "m").value();
  out.mir = ir::MirDir{mir.dir, mir.graph, {}, mir.files, mir.index, {}};
  const std::set<std::string> touched = smoothed_tensors(mir, choice, c.smooth_down);
  ir::split_layers(out.mir.graph, [](const ir::Block&, int32_t layer) { return std::to_string(layer); });
  for (ir::Block& b : out.mir.graph.blocks)
    for (ir::WeightDecl& d : b.weights)
      if (touched.count(ir::full_name(d.name, b.layers[0]))) d.dtype = DType::kF32;
  std::vector<float> rows(size_t(token_count(s) * kHidden));
  PieceEngine::build(ir::piece_of(mir, -1), beside, 0, longest_of(s), pool)->run_embedding(s, rows);
  std::set<std::string> changed;
  for (int32_t layer = 0; layer < mir.graph.info.layers; ++layer) {
    auto engine = PieceEngine::build(ir::piece_of(mir, layer), beside, 0, longest_of(s), pool).value();
    const LayerCapture seen = capture_layer(engine, mir.graph.block_of(layer), layer, s, rows, rows, c.gptq_tokens);
    out.layers.push_back(plan_smoothing(mir, mir.graph.block_of(layer), choice, seen, c, pool, &out.notes));
    LayerPlan plan;
    plan.smoothing = out.layers.back();
    for (auto& [name, tensor] : round_layer(mir, out.mir.graph.block_of(layer), layer, plan, c, pool).made) {
      out.mir.made[name] = tensor;
      changed.insert(name);
    }
  }
  EXPECT_EQ(changed, touched);  // known before any number is
  return out;
}

struct SmoothModelTest : ::testing::Test {
  TempDir dir;
  hw::ThreadPool pool{2};
  // Outlier channels in front of every norm's readers and inside the experts, so that there is something to smooth.
  ir::MirDir mir = ir::MirDir::open(write_tiny(dir.path(), "bf16", [](const std::string& name, std::vector<float>& v) {
                     if (name.find("norm.weight") != name.npos) v[3] *= 6;
                     if (name.ends_with("experts.up.weight"))
                       for (size_t i = 0; i < v.size(); ++i)
                         if (int64_t(i) / kHidden % kInner == 7) v[i] *= 20;
                   })).value();
  Sequences s = random_ids({40, 1, 33, 50, 64}, 50);
};

void expect_same_function(const Outputs& a, const Outputs& b) {
  ASSERT_EQ(a.logits.size(), b.logits.size());
  EXPECT_EQ(a.experts, b.experts);
  float largest = 0, difference = 0;
  for (size_t i = 0; i < a.logits.size(); ++i) {
    largest = std::max(largest, std::fabs(a.logits[i]));
    difference = std::max(difference, std::fabs(a.logits[i] - b.logits[i]));
  }
  EXPECT_GT(largest, 0.1);
  EXPECT_LT(difference, 1e-4 * std::max(largest, 1.0f));
  EXPECT_GT(difference, 0);  // something was smoothed
}

TEST_F(SmoothModelTest, KeepsLogitsAndExpertChoices) {
  const Outputs before = run(mir, dir / "before", s, pool);
  for (const char* yaml : {"", "smooth_quant: {alpha: 1}", "smooth_quant: {alpha: 0}", "smooth_quant: {down: true}", "smooth_quant: {alpha: search, down: true}",
                           "smooth_quant: {layers: {0: 0.2, 2: 0.9}, down: true}", "sensitive_layers: [\"re:.*moe\"], smooth_quant: {down: true}",
                           "weight_bits: 4, group_size: 32, smooth_quant: {alpha: search, down: true}"}) {
    SCOPED_TRACE(yaml);
    const SmoothedModel m = smooth(mir, recipe(yaml), dir / "piece", s, pool);
    expect_same_function(before, run(m.mir, dir / "after", s, pool));
  }
}

TEST_F(SmoothModelTest, AndOfFullFloatWeights) {
  TempDir other;
  const ir::MirDir f32 = ir::MirDir::open(write_tiny(other.path(), "f32")).value();
  const SmoothedModel m = smooth(f32, recipe("smooth_quant: {down: true}"), dir / "piece", s, pool);
  expect_same_function(run(f32, dir / "before", s, pool), run(m.mir, dir / "after", s, pool));
}

TEST_F(SmoothModelTest, DownHasFactorsOfEachExpertsOwn) {
  const SmoothedModel m = smooth(mir, recipe("smooth_quant: {down: true}"), dir / "piece", s, pool);
  for (const int32_t layer : {1, 2}) {
    const LayerSmoothing& l = m.layers[size_t(layer)];
    const std::vector<float>& h = l.divisor.at("h");
    ASSERT_EQ(int64_t(h.size()), kExperts * kInner);
    const std::string moe = "layers." + std::to_string(layer) + ".moe.experts.";
    EXPECT_EQ(l.tensors.at(moe + "up.weight").row_divisor, h);
    EXPECT_EQ(l.tensors.at(moe + "down.weight").column_scale, h);
    EXPECT_EQ(l.tensors.count(moe + "gate.weight"), 1u);  // reads m: smoothed with the norm, not by rows
    EXPECT_TRUE(l.tensors.at(moe + "gate.weight").row_divisor.empty());
    int64_t different = 0;
    for (int64_t e = 1; e < kExperts; ++e) different += !std::equal(h.begin(), h.begin() + kInner, h.begin() + e * kInner);
    EXPECT_EQ(different, kExperts - 1);
    // The channel with large numbers is divided by more than the median one, in every expert.
    for (int64_t e = 0; e < kExperts; ++e) {
      std::vector<float> of(h.begin() + e * kInner, h.begin() + (e + 1) * kInner);
      const float outlier = of[7];
      std::nth_element(of.begin(), of.begin() + kInner / 2, of.end());
      EXPECT_GT(outlier, 1.4f * of[kInner / 2]) << "expert " << e;
    }
  }
  // gate and up of the dense layer are slices of one matrix: nothing there can be divided alone, and the report says so.
  EXPECT_EQ(m.layers[0].divisor.count("h"), 0u);
  std::vector<std::string> skipped;
  smooth_sites(mir.graph.blocks[0], true, &skipped);
  EXPECT_THAT(skipped, ::testing::Contains(HasSubstr("not smoothed: h of dense")));
}

TEST_F(SmoothModelTest, AnExpertThatSawNothingIsLeftAlone) {
  const QuantConfig c = recipe("smooth_quant: {down: true}");
  const Sequences one = random_ids({1}, 50);  // one token: two of six experts
  const SmoothedModel m = smooth(mir, c, dir / "piece", one, pool);
  const std::vector<float>& h = m.layers[1].divisor.at("h");
  int64_t untouched = 0;
  for (int64_t e = 0; e < kExperts; ++e)
    untouched += std::all_of(h.begin() + e * kInner, h.begin() + (e + 1) * kInner, [](float v) { return v == 1; });
  EXPECT_EQ(untouched, kExperts - 2);
  expect_same_function(run(mir, dir / "before", s, pool), run(m.mir, dir / "after", s, pool));
}

TEST_F(SmoothModelTest, OnlySitesWithARoundedReader) {
  const SmoothedModel m = smooth(mir, recipe("sensitive_layers: [layers.1, layers.0.attn], smooth_quant: {down: true}"), dir / "piece", s, pool);
  EXPECT_EQ(m.layers[1].divisor.size(), 0u);
  EXPECT_EQ(m.layers[0].divisor.count("n"), 0u);
  EXPECT_EQ(m.layers[0].divisor.count("m"), 1u);
  EXPECT_EQ(m.layers[2].divisor.size(), 3u);  // n, m, h
}

TEST_F(SmoothModelTest, TheRouterIsAReader) {
  const SmoothedModel m = smooth(mir, recipe(""), dir / "piece", s, pool);
  const LayerSmoothing& l = m.layers[1];
  EXPECT_EQ(l.tensors.at("layers.1.moe.router.weight").column_scale, l.divisor.at("m"));
  EXPECT_EQ(l.tensors.at("layers.1.moe.norm.weight").norm_divisor, l.divisor.at("m"));
}

TEST_F(SmoothModelTest, SearchedAlphasAreOfTheGridAndForThreadsTheSame) {
  const QuantConfig c = recipe("smooth_quant: {alpha: search, down: true, layers: {1: 0.35}}");
  const SmoothedModel a = smooth(mir, c, dir / "piece", s, pool);
  hw::ThreadPool single(1), three(3);
  for (hw::ThreadPool* other : {&single, &three}) {
    const SmoothedModel b = smooth(mir, c, dir / "piece", s, *other);
    for (size_t i = 0; i < a.layers.size(); ++i) {
      EXPECT_EQ(a.layers[i].alpha, b.layers[i].alpha);
      EXPECT_EQ(a.layers[i].divisor, b.layers[i].divisor);
    }
  }
  EXPECT_TRUE(a.layers[1].alpha.empty());  // given, not searched
  EXPECT_THAT(a.layers[2].alpha, ::testing::SizeIs(3));
  for (const auto& [value, alpha] : a.layers[2].alpha) {
    EXPECT_GE(alpha, 0.4 - 1e-9);
    EXPECT_LE(alpha, 0.8 + 1e-9);
    EXPECT_NEAR(alpha * 20, std::round(alpha * 20), 1e-9);
  }
}

TEST(SmoothSitesTest, AnActivationThatIsNotLinearInUpIsNoSite) {
  std::string text = compiler::testing::tiny_mir("bf16");
  const ir::Graph plain = ir::testing::legal_graph(text);
  EXPECT_EQ(smooth_sites(plain.blocks[1], true, nullptr).size(), 3u);
  EXPECT_EQ(smooth_sites(plain.blocks[1], false, nullptr).size(), 2u);
  const std::string from = "h = activation g, u : f32[P, 20]";
  text.replace(text.find(from), from.size(), "h = activation g, u {kind=swiglu_oai} : f32[P, 20]");
  const ir::Graph oai = ir::testing::legal_graph(text);
  std::vector<std::string> skipped;
  EXPECT_EQ(smooth_sites(oai.blocks[1], true, &skipped).size(), 2u);
  EXPECT_THAT(skipped, ElementsAre(HasSubstr("not smoothed: h of moe")));
}

TEST(SmoothScalesTest, NothingOverflows) {
  const auto s = smooth_scales({1e30f, 1e-30f, 1, 1}, {1e-30f, 1e30f, 1e30f, 1e-30f}, 0.5);
  for (float v : s) EXPECT_TRUE(v >= 1e-5f && v <= 1e5f) << v;
}

TEST(ColumnMaxTest, OfAllExpertsOrOne) {
  std::vector<float> v = {1, -5, 2, 3, /**/ -7, 1, 0, 2};
  const Tensor t = tensor_f32({2, 2, 2}, v);
  hw::ThreadPool pool(2);
  EXPECT_EQ(column_max(t.view(), -1, pool), (std::vector<float>{7, 5}));
  EXPECT_EQ(column_max(t.view(), 0, pool), (std::vector<float>{2, 5}));
  EXPECT_EQ(column_max(t.view(), 1, pool), (std::vector<float>{7, 2}));
}

}  // namespace
}  // namespace mi::quant
