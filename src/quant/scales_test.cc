// Static activation scales: which values get one, and which number.
#include "quant/scales.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "ir/edit.h"
#include "ir/verify.h"
#include "quant/choice.h"
#include "quant/testing.h"

namespace mi::quant {
namespace {

using ::testing::HasSubstr;
using testing::recipe;

float observed_limit(std::vector<float> m, const QuantConfig& c) { return quant::observed_limit(std::move(m), c.observer, c.percentile); }

TEST(ObservedLimitTest, MinmaxIsTheLargest) {
  EXPECT_EQ(observed_limit({1, 5, 2, 0}, recipe("observer: minmax")), 5);
  EXPECT_EQ(observed_limit({}, recipe("observer: minmax")), 0);
  EXPECT_EQ(observed_limit({0, 0}, recipe("observer: mse")), 0);
}

TEST(ObservedLimitTest, PercentileLeavesOutTheTail) {
  std::vector<float> m;
  for (int i = 1; i <= 1000; ++i) m.push_back(float((i * 7) % 1000 + 1));  // 1..1000, mixed
  EXPECT_NEAR(observed_limit(m, recipe("observer: percentile, percentile: 99")), 990, 1);
  EXPECT_NEAR(observed_limit(m, recipe("observer: percentile, percentile: 75")), 750, 1);
  EXPECT_EQ(observed_limit(m, recipe("observer: percentile, percentile: 100")), 1000);
  m.push_back(1e6f);
  EXPECT_LT(observed_limit(m, recipe("observer: percentile, percentile: 99.5")), 1000);
}

double squared_error(const std::vector<float>& m, float limit) {
  const double scale = limit / 127.0;
  double e = 0;
  for (float v : m) {
    const double d = std::min(std::nearbyint(v / scale), 127.0) * scale - v;
    e += d * d;
  }
  return e;
}

TEST(ObservedLimitTest, MseCutsOneOutlierAmongManyAndKeepsAGrid) {
  std::vector<float> m;
  for (int i = 0; i < 100000; ++i) m.push_back(std::fabs(random_normal(3, uint64_t(i))));
  m.push_back(12);  // as large as twelve deviations: cutting it costs less than coarse steps for all the others
  const float limit = observed_limit(m, recipe("observer: mse"));
  EXPECT_LT(limit, 9);
  EXPECT_GT(limit, 3);
  // As good as any limit of a finer search, to a few percent.
  double best = INFINITY;
  for (float l = 1; l <= 12; l += 0.05f) best = std::min(best, squared_error(m, l));
  EXPECT_LT(squared_error(m, limit), 1.05 * best);
  EXPECT_LT(squared_error(m, limit), 0.8 * squared_error(m, 12));

  std::vector<float> grid;
  for (int i = 0; i <= 127; ++i) grid.push_back(float(i) / 4);
  EXPECT_EQ(observed_limit(grid, recipe("observer: mse")), 127.0f / 4);  // already on a grid: nothing is cut
}

// tiny_mir with every rounded matrix int8.
ir::Graph quantized_graph(const std::string& yaml = "") {
  ir::Graph g = ir::testing::legal_graph(compiler::testing::tiny_mir("bf16"));
  const Choice choice = Choice::make(recipe(yaml), g, "m").value();
  EXPECT_TRUE(ir::to_quantized(g, [&](int32_t layer, const ir::WeightDecl& d) { return choice.format(layer, d); }).ok());
  return g;
}

TEST(StoredScalesTest, ChosenByMatrixAndSharedByValue) {
  const ir::Graph g = quantized_graph();
  EXPECT_FALSE(StoredScales::choose(recipe(""), g)->any());
  const StoredScales all = StoredScales::choose(recipe("activation_scheme: per_tensor"), g).value();
  EXPECT_TRUE(all.is_static(0, "n") && all.is_static(0, "o") && all.is_static(0, "m") && all.is_static(0, "h") && all.is_static(2, "h"));
  EXPECT_FALSE(all.is_static(0, "x") || all.is_static(3, "n"));

  // One reader that wants a scale per token decides for all that share its input.
  const StoredScales some = StoredScales::choose(recipe("activation_scheme: per_tensor, activations: {layers.1.attn.k: per_token, \"re:.*down\": per_token}"), g).value();
  EXPECT_FALSE(some.is_static(1, "n") || some.is_static(0, "h") || some.is_static(1, "h") || some.is_static(2, "h"));
  EXPECT_TRUE(some.is_static(0, "n") && some.is_static(2, "n") && some.is_static(1, "m"));

  // The last word wins.
  const StoredScales last = StoredScales::choose(recipe("activations: {\"re:.*\": per_tensor, layers.2: per_token, layers.2.attn.o: per_tensor}"), g).value();
  EXPECT_TRUE(last.is_static(2, "o") && last.is_static(1, "h"));
  EXPECT_FALSE(last.is_static(2, "n") || last.is_static(2, "m"));

  const auto none = StoredScales::choose(recipe("activations: {layers.7: per_tensor}"), g);
  ASSERT_FALSE(none.ok());
  EXPECT_THAT(none.error().message(), HasSubstr("activations: 'layers.7' matches no module"));
  // A matrix that stays float has no rounded input; that it was named is no mistake, it may have been found to stay so.
  EXPECT_FALSE(StoredScales::choose(recipe("activations: {layers.1.moe.router: per_tensor}"), g)->any());
  const ir::Graph part = quantized_graph("sensitive_layers: [layers.1.attn]");
  const StoredScales mixed = StoredScales::choose(recipe("activation_scheme: per_tensor, activations: {layers.1.attn.o: per_token}"), part).value();
  EXPECT_FALSE(mixed.is_static(1, "n") || mixed.is_static(1, "o"));
  EXPECT_TRUE(mixed.is_static(1, "m") && mixed.is_static(0, "o"));
}

TEST(StoredScalesTest, SaturationIsTheLastWord) {
  const ir::Graph g = quantized_graph();
  const StoredScales some = StoredScales::choose(recipe("saturation: {layers: [\"re:.*moe.*down\", layers.0.attn.k]}"), g).value();
  EXPECT_TRUE(some.saturates(1, "h") && some.saturates(2, "h") && some.saturates(0, "n"));
  EXPECT_FALSE(some.saturates(0, "h") || some.saturates(1, "n") || some.saturates(0, "o") || some.saturates(1, "m"));
  EXPECT_FALSE(some.is_static(1, "h") || some.is_static(0, "n") || some.is_static(0, "o"));
  // Among static scales: where saturation is asked for, rows have scales of their own.
  const StoredScales both = StoredScales::choose(recipe("activation_scheme: per_tensor, activations: {layers.1: per_tensor, layers.2: per_token}, saturation: {layers: [layers.1.moe.experts.down, layers.2.attn.o]}"), g).value();
  EXPECT_TRUE(both.saturates(1, "h") && both.saturates(2, "o") && both.is_static(1, "m") && both.is_static(0, "h"));
  EXPECT_FALSE(both.is_static(1, "h") || both.is_static(2, "n") || both.saturates(2, "n"));

  const auto none = StoredScales::choose(recipe("saturation: {layers: [layers.7]}"), g);
  ASSERT_FALSE(none.ok());
  EXPECT_THAT(none.error().message(), HasSubstr("saturation.layers: 'layers.7' matches no module"));
  EXPECT_FALSE(StoredScales::choose(recipe("saturation: {layers: [layers.1.moe.router]}"), g)->any());  // stays float
}

TEST(StoredScalesTest, NodesSaturateWhereDeclared) {
  ir::Graph g = quantized_graph();
  StoredScales::choose(recipe("activations: {layers.0.attn.o: per_tensor}, saturation: {layers: [layers.1.moe.experts.down]}"), g)->declare(g);
  const Status s = ir::verify(g);
  ASSERT_TRUE(s.ok()) << s.error().message();
  std::vector<std::string> fixed, saturating;
  for (const ir::Block& b : g.blocks)
    for (const ir::Node& n : b.nodes)
      if (n.op == Op::kQuantize && !n.weights.empty())
        for (int32_t layer : b.layers)
          (std::get<QuantizeParams>(n.params).saturate ? saturating : fixed)
              .push_back(ir::full_name(b.weights[size_t(n.weights[0].weights[0])].name, layer));
  EXPECT_THAT(fixed, ::testing::ElementsAre("layers.0.act.o.scale"));
  EXPECT_THAT(saturating, ::testing::ElementsAre("layers.1.act.h.scale"));
}

TEST(StoredScalesTest, DeclaredWhereChosen) {
  ir::Graph g = quantized_graph();
  StoredScales::choose(recipe("activations: {layers.1.moe.experts.down: per_tensor, layers.0.attn.o: per_tensor}"), g)->declare(g);
  const Status s = ir::verify(g);
  ASSERT_TRUE(s.ok()) << s.error().message();
  std::vector<std::string> scales;
  for (const auto& d : ir::declared_tensors(g))
    if (d.name.find("act.") != std::string::npos) scales.push_back(d.name);
  EXPECT_THAT(scales, ::testing::UnorderedElementsAre("layers.0.act.o.scale", "layers.1.act.h.scale"));
}

// Two tokens, two experts each, values of two channels.
LayerCapture small_capture() {
  LayerCapture c;
  c.layer = 1;
  c.kept = 2;
  c.k = 2;
  c.chosen = {0, 1, 1, 0};
  c.values["m"] = {2, false, {4, 8}, {-4, 1, 2, -8}};
  c.values["h"] = {2, true, {6, 10}, {6, 0, 1, -2, -3, 10, 2, 4}};
  return c;
}

TEST(StoredScalesTest, MeasuredOverWhatSmoothingLeaves) {
  ir::Graph g = quantized_graph();
  const QuantConfig c = recipe("activation_scheme: per_tensor");
  const StoredScales scales = StoredScales::choose(c, g).value();
  LayerSmoothing smoothing;
  auto numbers = scales.measure(small_capture(), smoothing, c);
  EXPECT_FLOAT_EQ(numbers.at("layers.1.act.m.scale"), 8.0f / 127);
  EXPECT_FLOAT_EQ(numbers.at("layers.1.act.h.scale"), 10.0f / 127);
  EXPECT_EQ(numbers.size(), 2u);

  smoothing.divisor["m"] = {0.5f, 4};
  numbers = scales.measure(small_capture(), smoothing, c);
  EXPECT_FLOAT_EQ(numbers.at("layers.1.act.m.scale"), 8.0f / 127);  // max(4 / 0.5, 8 / 4)

  // Per expert: each row by the divisors of the expert that it went to. Rows of h: experts 0, 1, 1, 0.
  smoothing.divisor["h"] = {2, 1, 1, 5};
  numbers = scales.measure(small_capture(), smoothing, c);
  EXPECT_FLOAT_EQ(numbers.at("layers.1.act.h.scale"), 4.0f / 127);  // 6/2, 0/1 | 1/1, 2/5 | 3/1, 10/5 | 2/2, 4/1

  // Where scales saturate it is the percentile of `saturation`, whatever the observer of static ones.
  const QuantConfig mixed = recipe("activation_scheme: per_tensor, observer: percentile, percentile: 100, saturation: {percentile: 51, layers: [\"re:.*experts.gate\"]}");
  const auto ends = StoredScales::choose(mixed, g)->measure(small_capture(), {}, mixed);
  EXPECT_FLOAT_EQ(ends.at("layers.1.act.m.scale"), 4.0f / 127);   // of 4, 1, 2, 8: sorted, place 2
  EXPECT_FLOAT_EQ(ends.at("layers.1.act.h.scale"), 10.0f / 127);  // all of it

  // A percentile of a smoothed value counts smoothed magnitudes.
  const QuantConfig p = recipe("activation_scheme: per_tensor, observer: percentile, percentile: 51");
  const auto cut = StoredScales::choose(p, g)->measure(small_capture(), smoothing, p);
  EXPECT_FLOAT_EQ(cut.at("layers.1.act.m.scale"), 4.0f / 127);  // of 8, 0.25, 4, 2: sorted, place 2
}

}  // namespace
}  // namespace mi::quant
