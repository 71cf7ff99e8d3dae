// Units, the front of choices, what is picked from it, and the automatic answers.
#include "quant/search.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "quant/testing.h"
#include "tensor/int4.h"

namespace mi::quant {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

const std::vector<LayerFormat> kFormats = {LayerFormat::kFloat, LayerFormat::kInt8, LayerFormat::kInt4G128, LayerFormat::kInt4G64, LayerFormat::kInt4G32};

Unit unit(const std::string& name, int32_t layer, ir::Mark mark, std::vector<UnitMatrix> matrices) {
  return {layer, name, mark, std::move(matrices), {}};
}

Candidate candidate(const std::string& name, LayerFormat f, double kl, bool static_scale = false) {
  Candidate c;
  c.name = name;
  c.format = f;
  c.kl = kl;
  c.static_scale = static_scale;
  c.measured = true;
  return c;
}

// `n` units of two shapes; KL of int4 is some ten times that of int8, and differs by unit over three decades.
Sensitivity some_units(int n) {
  Sensitivity s;
  for (int i = 0; i < n; ++i) {
    const bool expert = i % 2 == 1;
    const std::string name = "layers." + std::to_string(i / 2) + (expert ? ".moe.experts" : ".attn");
    s.units.push_back(unit(name, i / 2, expert ? ir::Mark::kExpert : ir::Mark::kAttention,
                           {{expert ? 64 : 96, 128, expert ? 8.0 : 1.0, expert ? 2.0 : 1.0}}));
    const double kl = 1e-6 * std::pow(10, 3 * double(random_unit(5, uint64_t(i))));
    s.candidates.push_back(candidate(name, LayerFormat::kInt8, kl));
    s.candidates.push_back(candidate(name, LayerFormat::kInt4G32, 8 * kl));
    s.candidates.push_back(candidate(name, LayerFormat::kInt4G64, 11 * kl));
    s.candidates.push_back(candidate(name, LayerFormat::kInt4G128, 15 * kl));
  }
  return s;
}

struct SearchTest : ::testing::Test {
  hw::ThreadPool pool{2};
  Sensitivity s = some_units(8);
  CostTable costs = CostTable::measure(s.units, kFormats, DType::kBF16, pool);
  std::vector<MixedChoice> front = pareto_front(s, costs, kFormats, DType::kBF16);
};

TEST_F(SearchTest, NobodyOnTheFrontIsBeaten) {
  ASSERT_GT(front.size(), 3u);
  for (const MixedChoice& a : front)
    for (const MixedChoice& b : front) {
      const bool no_worse = a.kl <= b.kl && a.seconds <= b.seconds && a.bytes <= b.bytes && a.expert_bits <= b.expert_bits;
      EXPECT_FALSE(no_worse && (a.kl < b.kl || a.seconds < b.seconds || a.bytes < b.bytes || a.expert_bits < b.expert_bits));
      EXPECT_TRUE(&a == &b || a.formats != b.formats);
    }
  for (size_t i = 1; i < front.size(); ++i) EXPECT_LE(front[i - 1].kl, front[i].kl);
}

TEST_F(SearchTest, NumbersOfAChoiceAreSumsOverItsUnits) {
  for (const double power : {1.0, 2.5}) {
    s.power = power;
    for (const MixedChoice& c : pareto_front(s, costs, kFormats, DType::kBF16)) {
      ASSERT_EQ(c.formats.size(), s.units.size());
      double kl = 0, seconds = 0, weights = 0, expert_weights = 0, expert_bytes = 0;
      int64_t bytes = 0;
      for (size_t u = 0; u < s.units.size(); ++u) {
        const Candidate* found = s.find(s.units[u].name, c.formats[u]);
        kl += c.formats[u] == LayerFormat::kFloat ? 0 : std::pow(found->kl, power);
        seconds += costs.seconds(s.units[u], c.formats[u]);
        const int64_t b = unit_bytes(s.units[u], c.formats[u], DType::kBF16);
        const UnitMatrix& m = s.units[u].matrices[0];
        bytes += b;
        weights += m.count * double(m.n * m.k);
        if (s.units[u].mark == ir::Mark::kExpert) expert_weights += m.count * double(m.n * m.k), expert_bytes += double(b);
      }
      EXPECT_NEAR(c.kl, std::pow(kl, 1 / power), 1e-12);
      EXPECT_NEAR(c.seconds, seconds, 1e-12);
      EXPECT_EQ(c.bytes, bytes);
      EXPECT_NEAR(c.bits, 8 * double(bytes) / weights, 1e-9);
      EXPECT_NEAR(c.expert_bits, 8 * expert_bytes / expert_weights, 1e-9);
    }
  }
}

TEST_F(SearchTest, TheEndsAreTheTruestTheFastestAndTheSmallest) {
  double fastest = 0;
  int64_t smallest = 0;
  for (const Unit& u : s.units) {
    double t = INFINITY;
    int64_t b = INT64_MAX;
    for (LayerFormat f : kFormats) t = std::min(t, costs.seconds(u, f)), b = std::min(b, unit_bytes(u, f, DType::kBF16));
    fastest += t;
    smallest += b;
  }
  EXPECT_THAT(front.front().formats, ::testing::Each(LayerFormat::kFloat));
  EXPECT_EQ(front.front().kl, 0);
  double least_seconds = INFINITY;
  int64_t least_bytes = INT64_MAX;
  for (const MixedChoice& c : front) least_seconds = std::min(least_seconds, c.seconds), least_bytes = std::min(least_bytes, c.bytes);
  EXPECT_NEAR(least_seconds, fastest, 1e-12);
  EXPECT_EQ(least_bytes, smallest);
}

TEST_F(SearchTest, ALimitOnTheExpertsTakesNothingFromOtherParts) {
  for (const double power : {1.0, 4.0}) {
    s.power = power;
    SearchLimits l;
    l.max_bits = 6;
    const auto picked = pick(pareto_front(s, costs, kFormats, DType::kBF16), l);
    ASSERT_TRUE(picked.ok()) << picked.error().message();
    EXPECT_LE(picked->expert_bits, 6);
    for (size_t u = 0; u < s.units.size(); ++u) {
      if (s.units[u].mark != ir::Mark::kExpert) {
        EXPECT_EQ(picked->formats[u], LayerFormat::kFloat) << s.units[u].name << " at power " << power;
      }
    }
  }
}

// A model of one enormous and many small parts: what is small must count at the ends, too.
TEST(SearchEndsTest, SmallUnitsBesideALargeOne) {
  Sensitivity s = some_units(6);
  s.units.push_back(unit("layers.9.mlp", 9, ir::Mark::kDense, {{64, 128, 1, 100000}}));
  s.candidates.push_back(candidate("layers.9.mlp", LayerFormat::kInt8, 5));
  for (LayerFormat f : {LayerFormat::kInt4G32, LayerFormat::kInt4G64, LayerFormat::kInt4G128}) s.candidates.push_back(candidate("layers.9.mlp", f, 50));
  for (Candidate& c : s.candidates)
    if (c.name != "layers.9.mlp") c.kl *= 1e-9;
  hw::ThreadPool pool(1);
  const CostTable costs = CostTable::measure(s.units, kFormats, DType::kBF16, pool);
  const auto front = pareto_front(s, costs, kFormats, DType::kBF16);
  EXPECT_EQ(front.front().kl, 0);
  double fastest = 0, least = INFINITY;
  for (const Unit& u : s.units) {
    double t = INFINITY;
    for (LayerFormat f : kFormats) t = std::min(t, costs.seconds(u, f));
    fastest += t;
  }
  for (const MixedChoice& c : front) least = std::min(least, c.seconds);
  EXPECT_DOUBLE_EQ(least, fastest);
}

TEST(SearchEndsTest, WithoutFloatTheTruestEndIsTheOneOfLeastKl) {
  const Sensitivity s = some_units(4);
  hw::ThreadPool pool(1);
  const std::vector<LayerFormat> formats = {LayerFormat::kInt8, LayerFormat::kInt4G32};
  const auto front = pareto_front(s, CostTable::measure(s.units, formats, DType::kBF16, pool), formats, DType::kBF16);
  EXPECT_THAT(front.front().formats, ::testing::Each(LayerFormat::kInt8));
}

// Choices made by hand: KL up, time down.
std::vector<MixedChoice> three_choices() {
  MixedChoice a, b, c;
  a.kl = 0, a.seconds = 3, a.bytes = 3000, a.expert_bits = 16;
  b.kl = 0.01, b.seconds = 2, b.bytes = 2000, b.expert_bits = 8;
  c.kl = 0.1, c.seconds = 1, c.bytes = 1000, c.expert_bits = 4.5;
  return {a, b, c};
}

double picked_kl(const SearchLimits& l) {
  const auto p = pick(three_choices(), l);
  EXPECT_TRUE(p.ok()) << (p.ok() ? "" : p.error().message());
  return p.ok() ? p->kl : -1;
}

TEST(PickTest, EachLimitHolds) {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(picked_kl({}), 0);                         // nothing to gain time for
  EXPECT_EQ(picked_kl({0, kAny, kNone}), 0);
  EXPECT_EQ(picked_kl({0.01, kAny, kNone}), 0.01);     // the fastest within
  EXPECT_EQ(picked_kl({0.05, kAny, kNone}), 0.01);
  EXPECT_EQ(picked_kl({1, kAny, kNone}), 0.1);
  EXPECT_EQ(picked_kl({kNone, 2999, kNone}), 0.01);    // the truest that is small enough
  EXPECT_EQ(picked_kl({kNone, 1000, kNone}), 0.1);
  EXPECT_EQ(picked_kl({kNone, kAny, 8}), 0.01);
  EXPECT_EQ(picked_kl({kNone, kAny, 7.9}), 0.1);
  EXPECT_EQ(picked_kl({0.05, 2500, 8}), 0.01);
}

std::string refusal_of_limits(const SearchLimits& l) {
  const auto p = pick(three_choices(), l);
  EXPECT_FALSE(p.ok());
  if (p.ok()) return "accepted";
  EXPECT_EQ(p.error().code(), ErrorCode::kCheckFailed);
  return p.error().message();
}

TEST(PickTest, RefusalsNameTheWayOut) {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
  // Too small: the size that is possible, under the name of the limit to raise.
  EXPECT_THAT(refusal_of_limits({kNone, 999, kNone}), HasSubstr("--memory"));
  EXPECT_THAT(refusal_of_limits({kNone, 999, kNone}), HasSubstr("1.00 kB"));
  EXPECT_THAT(refusal_of_limits({kNone, 999, kNone}), Not(HasSubstr("--max-kl")));  // that was not asked for
  EXPECT_THAT(refusal_of_limits({kNone, kAny, 4}), HasSubstr("--max-bits 4"));
  EXPECT_THAT(refusal_of_limits({kNone, kAny, 4}), HasSubstr("4.5"));
  // Small enough is possible, true enough is possible, both are not.
  EXPECT_THAT(refusal_of_limits({0.05, 1500, kNone}), HasSubstr("--max-kl 0.05"));
  EXPECT_THAT(refusal_of_limits({0.05, 1500, kNone}), HasSubstr("0.10000"));
}

TEST(PickTest, NoUnitsNoChoice) {
  EXPECT_FALSE(pick({}, {}).ok());
}

TEST(AutomaticTest, FloatUnitsAreTheFewest) {
  Sensitivity s;
  const double kl[] = {0.001, 0.5, 0.002, 0.1, 0.003};
  for (int i = 0; i < 5; ++i) {
    s.candidates.push_back(candidate("u" + std::to_string(i), LayerFormat::kInt8, kl[i]));
    s.candidates.push_back(candidate("u" + std::to_string(i), LayerFormat::kInt4G32, 100));       // is not asked
    s.candidates.push_back(candidate("v" + std::to_string(i), LayerFormat::kInt8, 100, true));    // nor are static scales
  }
  const auto names = [](const std::vector<const Candidate*>& v) {
    std::vector<std::string> n;
    for (const Candidate* c : v) n.push_back(c->name);
    return n;
  };
  EXPECT_THAT(names(float_units(s, LayerFormat::kInt8, 1)), ElementsAre());
  EXPECT_THAT(names(float_units(s, LayerFormat::kInt8, 0.2)), ElementsAre("u1"));
  EXPECT_THAT(names(float_units(s, LayerFormat::kInt8, 0.0061)), ElementsAre("u1", "u3"));
  EXPECT_THAT(names(float_units(s, LayerFormat::kInt8, 0.0031)), ElementsAre("u1", "u3", "u4"));
  EXPECT_EQ(float_units(s, LayerFormat::kInt8, 0).size(), 5u);
  EXPECT_EQ(float_units(s, LayerFormat::kInt4G32, 50).size(), 5u);
}

// Four parts of 0.2 each: 0.8 in sum, 0.4 as the root of their squares.
TEST(PowerTest, IsTheOneThatFitsWhatWasMeasured) {
  Sensitivity s;
  for (int i = 0; i < 4; ++i) {
    s.candidates.push_back(candidate("u" + std::to_string(i), LayerFormat::kInt8, 0.002));
    s.candidates.push_back(candidate("u" + std::to_string(i), LayerFormat::kInt4G32, 0.2));
    s.candidates.push_back(candidate("u" + std::to_string(i), LayerFormat::kInt4G128, 77));  // did not run together
    s.candidates.push_back(candidate("u" + std::to_string(i), LayerFormat::kInt8, 33, true));
  }
  s.joint = {{LayerFormat::kInt4G32, 0.4, 0}};
  s.fit_power();
  EXPECT_NEAR(s.power, 2, 1e-9);
  EXPECT_NEAR(s.joint[0].sum, 0.8, 1e-12);
  EXPECT_NEAR(s.together({0.3, 0.4}), 0.5, 1e-9);
  // Two that disagree: the errors of the two predictions are equal and opposite.
  s.joint = {{LayerFormat::kInt8, 0.008, 0}, {LayerFormat::kInt4G32, 0.4, 0}};
  s.fit_power();
  EXPECT_GT(s.power, 1);
  EXPECT_LT(s.power, 2);
  EXPECT_NEAR(s.together({0.002, 0.002, 0.002, 0.002}) / 0.008 * s.together({0.2, 0.2, 0.2, 0.2}) / 0.4, 1, 1e-9);
  s.joint = {{LayerFormat::kInt8, 0.008, 0}};  // they add up
  s.fit_power();
  EXPECT_NEAR(s.power, 1, 1e-9);
  s.joint.clear();
  s.fit_power();
  EXPECT_EQ(s.power, 1);
}

TEST(AutomaticTest, FloatUnitsTogetherCostWhatThePowerSays) {
  Sensitivity s;
  for (int i = 0; i < 4; ++i) s.candidates.push_back(candidate("u" + std::to_string(i), LayerFormat::kInt8, 0.2));
  EXPECT_EQ(float_units(s, LayerFormat::kInt8, 0.41).size(), 2u);
  s.power = 2;
  EXPECT_EQ(float_units(s, LayerFormat::kInt8, 0.41).size(), 0u);
  EXPECT_EQ(float_units(s, LayerFormat::kInt8, 0.39).size(), 1u);
}

TEST(AutomaticTest, PerTokenValuesAreTheFewest) {
  Sensitivity s;
  s.candidates = {candidate("u", LayerFormat::kInt8, 100), candidate("layers.0.n", LayerFormat::kInt8, 0.01, true),
                  candidate("layers.0.h", LayerFormat::kInt8, 0.3, true), candidate("layers.1.n", LayerFormat::kInt8, 0.02, true)};
  EXPECT_EQ(per_token_values(s, 0.5).size(), 0u);
  ASSERT_EQ(per_token_values(s, 0.1).size(), 1u);
  EXPECT_EQ(per_token_values(s, 0.1)[0]->name, "layers.0.h");
  EXPECT_EQ(per_token_values(s, 0.02).size(), 2u);
  EXPECT_EQ(per_token_values(s, 0).size(), 3u);
}

TEST(UnitsTest, MatricesOfOneJobAreOneUnit) {
  const ir::Graph g = ir::testing::legal_graph(compiler::testing::tiny_mir("bf16"));
  const std::vector<Unit> units = units_of(g);
  std::vector<std::string> names;
  for (const Unit& u : units) names.push_back(u.name);
  EXPECT_THAT(names, ElementsAre("layers.0.attn", "layers.0.mlp", "layers.1.attn", "layers.1.moe.experts", "layers.2.attn", "layers.2.moe.experts"));
  EXPECT_EQ(units[0].matrices.size(), 4u);
  EXPECT_THAT(units[0].values, ElementsAre("n", "o"));
  EXPECT_EQ(units[3].matrices.size(), 3u);
  EXPECT_EQ(units[3].matrices[0].count, 6);
  EXPECT_EQ(units[3].matrices[0].active, 2);  // of six experts a token takes two
  EXPECT_EQ(units[3].mark, ir::Mark::kExpert);
  // q 32x24, k and v 16x24, o 24x32.
  EXPECT_EQ(unit_bytes(units[0], LayerFormat::kFloat, DType::kBF16), 2 * (32 * 24 + 2 * 16 * 24 + 24 * 32));
  EXPECT_EQ(unit_bytes(units[0], LayerFormat::kInt8, DType::kBF16), 32 * 24 + 2 * 16 * 24 + 24 * 32 + 4 * (32 + 2 * 16 + 24));
  EXPECT_GT(bits_per_weight(units[0], LayerFormat::kFloat, DType::kF32), bits_per_weight(units[0], LayerFormat::kInt8, DType::kF32));
  EXPECT_EQ(bits_per_weight(units[0], LayerFormat::kFloat, DType::kF32), 32);
  EXPECT_LT(unit_bytes(units[3], LayerFormat::kInt4G32, DType::kBF16), unit_bytes(units[3], LayerFormat::kInt8, DType::kBF16));
  // A router and a head are no units, nor is what is rounded already.
  EXPECT_TRUE(units_of(ir::testing::legal_graph(compiler::testing::tiny_mir("w8a8"))).empty());
}

TEST(UnitsTest, BytesAreThoseThatAreStored) {
  const Unit u = unit("u", 0, ir::Mark::kExpert, {{24, 200, 6, 2}});
  for (const LayerFormat f : {LayerFormat::kInt4G32, LayerFormat::kInt4G64, LayerFormat::kInt4G128}) {
    const int64_t groups = (200 + group_of(f) - 1) / group_of(f);
    EXPECT_EQ(unit_bytes(u, f, DType::kBF16), 6 * 24 * (100 + 2 * groups));
  }
}

TEST_F(SearchTest, TheTextMarksWhatWasPicked) {
  const MixedChoice picked = front[front.size() / 2];
  const std::string text = front_text(front, &picked);
  EXPECT_THAT(text, HasSubstr("<- picked"));
  EXPECT_EQ(text.find("<- picked"), text.rfind("<- picked"));
  EXPECT_THAT(front_text(front, nullptr), Not(HasSubstr("picked")));
  const Json j = front_json(front, s);
  ASSERT_EQ(j.size(), front.size());
  EXPECT_EQ(j[0]["formats"]["layers.0.attn"], "float");
  const auto lines = explain(s, costs, picked, kFormats);
  ASSERT_EQ(lines.size(), s.units.size());
  EXPECT_THAT(lines[1], HasSubstr("layers.0.moe.experts"));
  EXPECT_THAT(lines[1], HasSubstr(std::string("*") + layer_format_name(picked.formats[1])));
}

}  // namespace
}  // namespace mi::quant
