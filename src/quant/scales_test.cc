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

TEST(StaticScalesTest, ChosenByMatrixAndSharedByValue) {
  const ir::Graph g = quantized_graph();
  EXPECT_FALSE(StaticScales::choose(recipe(""), g)->any());
  const StaticScales all = StaticScales::choose(recipe("activation_scheme: per_tensor"), g).value();
  EXPECT_TRUE(all.has(0, "n") && all.has(0, "o") && all.has(0, "m") && all.has(0, "h") && all.has(2, "h"));
  EXPECT_FALSE(all.has(0, "x") || all.has(3, "n"));

  // One reader that wants a scale per token decides for all that share its input.
  const StaticScales some = StaticScales::choose(recipe("activation_scheme: per_tensor, activations: {layers.1.attn.k: per_token, \"re:.*down\": per_token}"), g).value();
  EXPECT_FALSE(some.has(1, "n") || some.has(0, "h") || some.has(1, "h") || some.has(2, "h"));
  EXPECT_TRUE(some.has(0, "n") && some.has(2, "n") && some.has(1, "m"));

  // The last word wins.
  const StaticScales last = StaticScales::choose(recipe("activations: {\"re:.*\": per_tensor, layers.2: per_token, layers.2.attn.o: per_tensor}"), g).value();
  EXPECT_TRUE(last.has(2, "o") && last.has(1, "h"));
  EXPECT_FALSE(last.has(2, "n") || last.has(2, "m"));

  const auto none = StaticScales::choose(recipe("activations: {layers.7: per_tensor}"), g);
  ASSERT_FALSE(none.ok());
  EXPECT_THAT(none.error().message(), HasSubstr("activations: 'layers.7' matches no module"));
  // A matrix that stays float has no rounded input; that it was named is no mistake, it may have been found to stay so.
  EXPECT_FALSE(StaticScales::choose(recipe("activations: {layers.1.moe.router: per_tensor}"), g)->any());
  const ir::Graph part = quantized_graph("sensitive_layers: [layers.1.attn]");
  const StaticScales mixed = StaticScales::choose(recipe("activation_scheme: per_tensor, activations: {layers.1.attn.o: per_token}"), part).value();
  EXPECT_FALSE(mixed.has(1, "n") || mixed.has(1, "o"));
  EXPECT_TRUE(mixed.has(1, "m") && mixed.has(0, "o"));
}

TEST(StaticScalesTest, DeclaredWhereChosen) {
  ir::Graph g = quantized_graph();
  StaticScales::choose(recipe("activations: {layers.1.moe.experts.down: per_tensor, layers.0.attn.o: per_tensor}"), g)->declare(g);
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

TEST(StaticScalesTest, MeasuredOverWhatSmoothingLeaves) {
  ir::Graph g = quantized_graph();
  const QuantConfig c = recipe("activation_scheme: per_tensor");
  const StaticScales scales = StaticScales::choose(c, g).value();
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

  // A percentile of a smoothed value counts smoothed magnitudes.
  const QuantConfig p = recipe("activation_scheme: per_tensor, observer: percentile, percentile: 51");
  const auto cut = StaticScales::choose(p, g)->measure(small_capture(), smoothing, p);
  EXPECT_FLOAT_EQ(cut.at("layers.1.act.m.scale"), 4.0f / 127);  // of 8, 0.25, 4, 2: sorted, place 2
}

}  // namespace
}  // namespace mi::quant
