#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/temp_dir.h"
#include "base/util.h"
#include "ir/testing.h"
#include "quant/calibration_data.h"
#include "quant/choice.h"
#include "quant/compare.h"
#include "quant/config.h"
#include "quant/int4.h"
#include "quant/int8.h"
#include "quant/smooth.h"
#include "tensor/dtype.h"

namespace mi::quant {
namespace {

using ::testing::HasSubstr;

std::string config_refusal(const std::string& yaml) {
  const auto r = parse_quant_config(yaml, "q.yaml");
  return r.ok() ? "accepted" : r.error().message();
}

TEST(QuantConfigTest, ReadsTheWholeRecipe) {
  const auto c = parse_quant_config(R"(
quant:
  weight_bits: 8
  activation_bits: 8
  weight_scheme: per_tensor
  activation_scheme: per_tensor
  calibration_samples: 64
  calibration_length: 128
  smooth_quant: {enable: false, alpha: 0.7}
  sensitive_layers: [a, "re:b.*"]
)",
                                    "q.yaml")
                     .value();
  EXPECT_EQ(c.weights, WeightScheme::kPerTensor);
  EXPECT_EQ(c.activations, ActivationScheme::kPerTensor);
  EXPECT_EQ(c.calibration_samples, 64);
  EXPECT_FALSE(c.smooth);
  EXPECT_EQ(c.smooth_alpha, 0.7);
  EXPECT_THAT(c.sensitive_layers, ::testing::ElementsAre("a", "re:b.*"));
  EXPECT_TRUE(parse_quant_config("quant: {}", "q").value().smooth);
}

TEST(QuantConfigTest, FourBits) {
  const auto c = parse_quant_config("quant: {weight_bits: 4}", "q").value();
  EXPECT_EQ(c.weights, WeightScheme::kPerGroup);
  EXPECT_EQ(c.group_size, 128);
  EXPECT_EQ(parse_quant_config("quant: {weight_bits: 4, weight_scheme: per_group, group_size: 32}", "q")->group_size,
            32);
}

TEST(QuantConfigTest, RefusesByName) {
  EXPECT_THAT(config_refusal("quant: {smooth_quant: {alhpa: 1}}"), HasSubstr("did you mean 'alpha'"));
  EXPECT_THAT(config_refusal("quant: {wieght_bits: 8}"), HasSubstr("did you mean 'weight_bits'"));
  EXPECT_THAT(config_refusal("quant: {weight_bits: 5}"), HasSubstr("weight_bits must be 8 or 4"));
  EXPECT_THAT(config_refusal("quant: {weight_bits: 4, weight_scheme: per_channel}"),
              HasSubstr("per_group with weight_bits 4"));
  EXPECT_THAT(config_refusal("quant: {weight_scheme: per_group}"), HasSubstr("per_channel or per_tensor with weight_bits 8"));
  EXPECT_THAT(config_refusal("quant: {weight_bits: 4, group_size: 48}"), HasSubstr("group_size must be 32, 64 or 128"));
  EXPECT_THAT(config_refusal("quant: {group_size: 64}"), HasSubstr("group_size goes with weight_bits 4"));
  EXPECT_THAT(config_refusal("quant: {weight_bits: eight}"), HasSubstr("expected an integer"));
  EXPECT_THAT(config_refusal("quant: {smooth_quant: {alpha: 1.5}}"), HasSubstr("between 0 and 1"));
  EXPECT_THAT(config_refusal("quant: {weight_scheme: per_row}"), HasSubstr("per_channel or per_tensor"));
  EXPECT_THAT(config_refusal("quant: {sensitive_layers: x}"), HasSubstr("list"));
  EXPECT_THAT(config_refusal("quant: {layers: {lm_head: int8, lm_head: float}}"), HasSubstr("'lm_head' occurs twice"));
  EXPECT_THAT(config_refusal("quant: {layers: [lm_head]}"), HasSubstr("layers: expected a mapping"));
  EXPECT_THAT(config_refusal("quant: {layers: {lm_head: int9}}"),
              HasSubstr("'lm_head' must be float, int8, int4, int4_g32, int4_g64 or int4_g128, not 'int9'"));
  EXPECT_THAT(config_refusal("quant: {weight_bits: 8, weight_bits: 4}"), HasSubstr("'weight_bits' occurs twice"));
  EXPECT_THAT(config_refusal("quant: {smooth_quant: {alpha: 0, alpha: 1}}"), HasSubstr("'alpha' occurs twice"));
  EXPECT_THAT(config_refusal("a: ["), HasSubstr("not valid YAML"));
  EXPECT_THAT(config_refusal("other: {}"), HasSubstr("other"));
  EXPECT_THAT(config_refusal(""), HasSubstr("quant"));
}

const std::vector<std::string> kModules = {"layers.0.attn.q", "layers.1.attn.q", "layers.1.moe.experts.gate",
                                           "layers.10.attn.q", "layers.10.moe.experts.gate"};

TEST(MatchingTest, NamesPrefixesAndPatterns) {
  EXPECT_THAT(*matching("k", "layers.1", kModules),
              ::testing::ElementsAre("layers.1.attn.q", "layers.1.moe.experts.gate"));
  EXPECT_THAT(*matching("k", "re:layers\\.10\\.moe", kModules), ::testing::ElementsAre("layers.10.moe.experts.gate"));
}

TEST(MatchingTest, NoMatchIsAnError) {
  EXPECT_THAT(matching("k", "gate", kModules).error().message(), HasSubstr("k: 'gate' matches no module"));
  EXPECT_THAT(matching("k", "re:(", kModules).error().message(), HasSubstr("not a valid pattern"));
  EXPECT_THAT(matching("k", "layers.0.attn.p", kModules).error().message(), HasSubstr("did you mean"));
}

// Two layers of two matrices and a router; a head that is the embedding or a matrix of its own.
ir::Graph two_layers(bool tied, bool rounded_o = false) {
  const std::string head = tied ? "embed.weight" : "lm_head.weight";
  std::string text = R"(mir 1
model "t" { family="t" model_type="t" vocab=32 hidden=8 layers=2 max_positions=64 eos_ids=[] bos_id=-1 pad_id=-1 }
prologue { weight embed.weight : bf16 [32, 8] embedding  x = embed weight=embed.weight : f32[T, 8]  output x }
block a layers = 0..1 {
  input x : f32[T, 8]
  weight attn.q.weight : bf16 [8, 8] attention
  weight attn.o.weight : )";
  text += rounded_o ? "w8a8 [8, 8] attention\n" : "bf16 [8, 8] attention\n";
  text += "  q = linear x, weight=attn.q.weight : f32[T, 8]\n";
  text += rounded_o ? "  q_q = quantize q : q8[T, 8]\n  y = linear q_q, weight=attn.o.weight : f32[T, 8]\n"
                    : "  y = linear q, weight=attn.o.weight : f32[T, 8]\n";
  text += "  output y }\nepilogue { input x : f32[T, 8]  weight " + head + " : bf16 [32, 8] " +
          (tied ? "embedding" : "head") + "\n  xs = select_rows x : f32[L, 8]  logits = linear xs, weight=" + head +
          " : f32[L, 32]  output logits }\n";
  return ir::testing::legal_graph(text);
}

Choice choose(const std::string& yaml, const ir::Graph& g) {
  auto c = Choice::make(parse_quant_config(yaml, "q").value(), g, "m");
  EXPECT_TRUE(c.ok()) << c.error().message();
  return c.ok() ? *c : Choice{};
}

std::string refused_choice(const std::string& yaml, const ir::Graph& g) {
  const auto c = Choice::make(parse_quant_config(yaml, "q").value(), g, "m");
  return c.ok() ? "accepted" : c.error().message();
}

TEST(ChoiceTest, TheLastWordWins) {
  const ir::Graph g = two_layers(false);
  const Choice plain = choose("quant: {}", g);
  EXPECT_TRUE(plain.rounds("layers.0.attn.q.weight"));
  EXPECT_FALSE(plain.rounds("lm_head.weight"));
  EXPECT_EQ(plain.rounded(), 4);
  const Choice c = choose(
      "quant: {sensitive_layers: [layers.0], group_size: 32, layers: {\"re:.*q\": float, layers.1.attn.q: int4, "
      "layers.0.attn.o: int8, lm_head: int8}}",
      g);
  EXPECT_FALSE(c.rounds("layers.0.attn.q.weight"));
  const auto format = [&](int32_t layer, const char* name) {
    return c.format(layer, {name, DType::kBF16, {8, 8}, ir::WeightFormat::kFloat, ir::Mark::kAttention});
  };
  EXPECT_EQ(format(1, "attn.q.weight").format, ir::WeightFormat::kW4A8);
  EXPECT_EQ(format(1, "attn.q.weight").group, 32);
  EXPECT_EQ(format(0, "attn.o.weight").format, ir::WeightFormat::kW8A8);
  EXPECT_EQ(format(-1, "lm_head.weight").format, ir::WeightFormat::kW8A8);
  EXPECT_EQ(c.kept(), 1);
  EXPECT_EQ(c.counts().size(), 5u);
  EXPECT_EQ(c.counts()[0].matches, 2);
}

TEST(ChoiceTest, ABeginningMeansWhatIsRoundedAnyway) {
  ir::Graph g = two_layers(false);
  for (ir::Block& b : g.blocks)
    for (ir::WeightDecl& d : b.weights)
      if (d.name == "attn.o.weight") d.mark = ir::Mark::kIndex;
  const Choice prefix = choose("quant: {layers: {layers.0.attn: int4}}", g);
  EXPECT_TRUE(prefix.rounds("layers.0.attn.q.weight"));
  EXPECT_FALSE(prefix.rounds("layers.0.attn.o.weight"));
  EXPECT_EQ(prefix.counts()[0].matches, 1);
  EXPECT_TRUE(choose("quant: {layers: {layers.0.attn.o: int8}}", g).rounds("layers.0.attn.o.weight"));
  EXPECT_FALSE(choose("quant: {layers: {layers.0.attn.o: int8, layers.0: float}}", g).rounds("layers.0.attn.o.weight"));
  const Choice pattern = choose("quant: {layers: {\"re:layers.*\": int8}}", g);
  EXPECT_TRUE(pattern.rounds("layers.1.attn.o.weight"));
  EXPECT_THAT(pattern.notes(), ::testing::ElementsAre(HasSubstr("2 of the 4 matrices that 're:layers.*' matches")));
}

TEST(ChoiceTest, ATiedHeadGetsAMatrixOfItsOwn) {
  ir::Graph g = two_layers(true);
  const Choice c = choose("quant: {layers: {lm_head: int8}}", g);
  ASSERT_TRUE(c.rounds_tied_head());
  EXPECT_FALSE(choose("quant: {}", g).rounds_tied_head());
  untie_head(g);
  const auto s = ir::to_quantized(g, [&](int32_t l, const ir::WeightDecl& d) { return c.format(l, d); });
  ASSERT_TRUE(s.ok()) << s.error().message();
  EXPECT_EQ(g.prologue.weights.at(0).format, ir::WeightFormat::kFloat);
  EXPECT_EQ(g.epilogue.weights.at(0).name, kHeadWeight);
  EXPECT_EQ(g.epilogue.weights.at(0).format, ir::WeightFormat::kW8A8);
}

TEST(ChoiceTest, OfAQuantizedModelOnlyWhatIsNamed) {
  const ir::Graph g = two_layers(false, true);
  EXPECT_THAT(refused_choice("quant: {}", g), HasSubstr("quantized already"));
  EXPECT_THAT(refused_choice("quant: {layers: {layers.0.attn.o: int8}}", g), HasSubstr("layers.0.attn.o is w8a8"));
  const Choice c = choose("quant: {layers: {lm_head: int8}}", g);
  EXPECT_EQ(c.rounded(), 1);
  EXPECT_TRUE(c.rounds("lm_head.weight"));
}

TEST(MatchingTest, HostilePatternsEnd) {
  EXPECT_THAT(matching("k", "re:((([a-z0-9._]*)*)*)*#", kModules).error().message(), HasSubstr("matches no"));
  std::string deep = "re:" + std::string(60000, '(') + std::string(60000, ')'), many = "re:";
  for (int i = 0; i < 2000; ++i) many += "(a*)*";
  for (const std::string& p : {deep, many})
    EXPECT_THAT(matching("k", p, kModules).error().message(), HasSubstr("characters"));
}

TEST(Int8Test, RoundsByRow) {
  const float w[] = {1.0f, -2.0f, 0.5f, 0, 0, 0, 1e-42f, 0, 0};
  int8_t q[9];
  float s[3];
  quantize_rows(w, 3, 3, WeightScheme::kPerChannel, q, s);
  EXPECT_EQ(q[0], 64);
  EXPECT_EQ(q[1], -127);
  EXPECT_EQ(q[2], 32);
  EXPECT_FLOAT_EQ(s[0], 2.0f / 127);
  EXPECT_EQ(s[1], 0.0f);
  EXPECT_EQ(q[6], 0);  // a subnormal row is zero, not garbage
  quantize_rows(w, 3, 3, WeightScheme::kPerTensor, q, s);
  EXPECT_EQ(s[0], s[2]);
  WeightError e;
  add_error(w, q, s, 3, 3, 3, &e);
  EXPECT_LT(e.relative(), 0.01);
}

TEST(Int4Test, FindsTheGridThatTheNumbersAreOn) {
  // Rows on a grid of -8..7 times a bfloat16 number: exact again, whatever the sign of the largest.
  for (float step : {0.25f, -0.25f}) {
    std::vector<float> w;
    for (int i = 0; i < 2 * 64; ++i) w.push_back(float(i % 16 - 8) * step);
    std::vector<int8_t> q(w.size());
    std::vector<float> s(2 * 2);
    quantize_rows_int4(w.data(), 2, 64, 32, q.data(), s.data());
    WeightError e;
    add_error(w.data(), q.data(), s.data(), 2, 64, 32, &e);
    EXPECT_EQ(e.err2, 0);
    EXPECT_GT(e.ref2, 0);
    EXPECT_EQ(s[0], step);
  }
}

TEST(Int4Test, NoWorseThanPlainRounding) {
  std::vector<float> w(size_t(64 * 300));
  for (size_t i = 0; i < w.size(); ++i) w[i] = random_normal(3, i) * (i % 97 == 0 ? 4.0f : 1.0f);
  std::vector<int8_t> q(w.size());
  for (int64_t group : {32, 64, 128}) {
    const int64_t groups = (300 + group - 1) / group;
    std::vector<float> s(size_t(64 * groups));
    quantize_rows_int4(w.data(), 64, 300, group, q.data(), s.data());
    for (int8_t v : q) ASSERT_TRUE(v >= -8 && v <= 7);
    for (float v : s) ASSERT_EQ(v, to_f32(to_bf16(v)));
    WeightError e;
    add_error(w.data(), q.data(), s.data(), 64, 300, group, &e);
    double plain = 0, ref = 0;  // steps of max|w| / 7, as without a search
    for (int64_t r = 0; r < 64; ++r)
      for (int64_t begin = 0; begin < 300; begin += group) {
        const int64_t end = std::min<int64_t>(300, begin + group);
        float top = 0;
        for (int64_t i = begin; i < end; ++i) top = std::max(top, std::fabs(w[size_t(r * 300 + i)]));
        for (int64_t i = begin; i < end; ++i) {
          const double v = w[size_t(r * 300 + i)], d = std::nearbyint(v * 7 / top) * top / 7 - v;
          plain += d * d;
          ref += v * v;
        }
      }
    EXPECT_LT(e.relative(), 0.9 * std::sqrt(plain / ref)) << group;
  }
}

TEST(Int4Test, ZerosAndNumbersTooSmall) {
  std::vector<float> w(32 * 3, 0.0f), s(3);
  for (size_t i = 0; i < 32; ++i) w[32 + i] = 1e-42f, w[64 + i] = i == 5 ? 1.0f : 0.0f;
  std::vector<int8_t> q(w.size(), 9);
  quantize_rows_int4(w.data(), 1, 96, 32, q.data(), s.data());
  EXPECT_EQ(s[0], 0.0f);
  EXPECT_EQ(s[1], 0.0f);
  for (size_t i = 0; i < 64; ++i) EXPECT_EQ(q[i], 0);
  EXPECT_EQ(float(q[69]) * s[2], 1.0f);
}

TEST(SmoothTest, FactorsBalance) {
  const auto s = smooth_scales({100, 1, 0, 4}, {1, 1, 1, 0}, 0.5);
  EXPECT_FLOAT_EQ(s[0], 10);
  EXPECT_FLOAT_EQ(s[1], 1);
  EXPECT_FLOAT_EQ(s[2], 1);  // never fires
  EXPECT_FLOAT_EQ(s[3], 1);  // no weight
}

TEST(CompareTest, KlDivergence) {
  const float a[] = {1, 2, 3}, b[] = {1, 2, 3}, c[] = {3, 2, 1};
  EXPECT_NEAR(kl_divergence(a, b, 3), 0, 1e-12);
  EXPECT_NEAR(kl_divergence(a, c, 3), 2 * (std::exp(3) - std::exp(1)) / (std::exp(1) + std::exp(2) + std::exp(3)),
              1e-9);
}

TEST(CalibrationTest, IdsWithoutTokenizer) {
  const TempDir dir;
  const Path file = dir / "calib.jsonl";
  CalibrationRequest r{file, 10, 3, 100};
  ASSERT_TRUE(write_file(file, "{\"ids\": [1, 2, 3, 4]}\n\n{\"ids\": [5]}\n").ok());
  const auto set = load_calibration(r, nullptr, nullptr).value();
  // The line's last quarter of a sequence and more is one; a line alone always.
  EXPECT_THAT(set.sequences, ::testing::ElementsAre(::testing::ElementsAre(1, 2, 3), ::testing::ElementsAre(4), ::testing::ElementsAre(5)));
  ASSERT_TRUE(write_file(file, "{\"ids\": [100]}\n").ok());
  EXPECT_THAT(load_calibration(r, nullptr, nullptr).error().message(), HasSubstr("vocabulary"));
  ASSERT_TRUE(write_file(file, "{\"text\": \"x\"}\n").ok());
  EXPECT_THAT(load_calibration(r, nullptr, nullptr).error().message(), HasSubstr("tokenizer"));
  ASSERT_TRUE(write_file(file, "").ok());
  EXPECT_FALSE(load_calibration(r, nullptr, nullptr).ok());
  r.file.clear();
  EXPECT_THAT(load_calibration(r, nullptr, nullptr)->source, HasSubstr("random"));
}

TEST(CalibrationTest, DrawnFromAllOfIt) {
  const TempDir dir;
  std::string sorted;
  for (int i = 0; i < 100; ++i) sorted += fmt::format("{{\"ids\": [{}]}}\n", i);
  ASSERT_TRUE(write_file(dir / "c.jsonl", sorted).ok());
  const CalibrationRequest first{dir / "c.jsonl", 40, 3, 100, false}, drawn{dir / "c.jsonl", 40, 3, 100, true};
  EXPECT_EQ(load_calibration(first, nullptr, nullptr)->sequences.back(), std::vector<int32_t>{39});
  const CalibrationSet set = *load_calibration(drawn, nullptr, nullptr);
  ASSERT_EQ(set.sequences.size(), 40u);
  EXPECT_EQ(set.unused, 60);
  EXPECT_EQ(set.sequences, load_calibration(drawn, nullptr, nullptr)->sequences);
  // What takes some of them, from either end or every eighth, takes from both halves of the file.
  const auto late = [&](size_t begin, size_t end, size_t step) {
    int n = 0;
    for (size_t i = begin; i < end; i += step) n += set.sequences[i][0] >= 50;
    return n;
  };
  for (int n : {late(0, 10, 1), late(30, 40, 1), late(7, 40, 8) * 2}) {
    EXPECT_GE(n, 2);
    EXPECT_LE(n, 8);
  }
  CalibrationRequest all = drawn;
  all.samples = 1000;
  auto whole = load_calibration(all, nullptr, nullptr)->sequences;
  EXPECT_EQ(whole.size(), 100u);
  std::sort(whole.begin(), whole.end());
  EXPECT_EQ(std::unique(whole.begin(), whole.end()), whole.end());
}

TEST(CompareTest, ErrorOfAMeanCountsSequencesNotTokens) {
  const std::vector<int64_t> even = {4, 4}, uneven = {1, 2, 5};
  EXPECT_DOUBLE_EQ(error_of_mean(std::vector<double>{1, 3}, even), 0.25);  // of the means 0.25 and 0.75
  EXPECT_EQ(error_of_mean(std::vector<double>{0.5, 1, 2.5}, uneven), 0);   // the same per token in each
  EXPECT_EQ(error_of_mean(std::vector<double>{7}, std::vector<int64_t>{4}), 0);
  EXPECT_EQ(error_of_mean(std::vector<double>{0, 0}, std::vector<int64_t>{0, 0}), 0);
}

}  // namespace
}  // namespace mi::quant
