#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/util.h"
#include "quant/calibration_data.h"
#include "quant/compare.h"
#include "quant/config.h"
#include "quant/int4.h"
#include "quant/int8.h"
#include "quant/smooth.h"
#include "tensor/dtype.h"

namespace mi::quant {
namespace {

using testing::HasSubstr;

std::string refusal(const std::string& yaml) {
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
  EXPECT_THAT(c.sensitive_layers, testing::ElementsAre("a", "re:b.*"));
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
  EXPECT_THAT(refusal("quant: {smooth_quant: {alhpa: 1}}"), HasSubstr("did you mean 'alpha'"));
  EXPECT_THAT(refusal("quant: {wieght_bits: 8}"), HasSubstr("did you mean 'weight_bits'"));
  EXPECT_THAT(refusal("quant: {weight_bits: 5}"), HasSubstr("weight_bits must be 8 or 4"));
  EXPECT_THAT(refusal("quant: {weight_bits: 4, weight_scheme: per_channel}"),
              HasSubstr("per_group with weight_bits 4"));
  EXPECT_THAT(refusal("quant: {weight_scheme: per_group}"), HasSubstr("per_channel or per_tensor with weight_bits 8"));
  EXPECT_THAT(refusal("quant: {weight_bits: 4, group_size: 48}"), HasSubstr("group_size must be 32, 64 or 128"));
  EXPECT_THAT(refusal("quant: {group_size: 64}"), HasSubstr("group_size goes with weight_bits 4"));
  EXPECT_THAT(refusal("quant: {weight_bits: eight}"), HasSubstr("expected an integer"));
  EXPECT_THAT(refusal("quant: {smooth_quant: {alpha: 1.5}}"), HasSubstr("between 0 and 1"));
  EXPECT_THAT(refusal("quant: {weight_scheme: per_row}"), HasSubstr("per_channel or per_tensor"));
  EXPECT_THAT(refusal("quant: {sensitive_layers: x}"), HasSubstr("list"));
  EXPECT_THAT(refusal("quant: {weight_bits: 8, weight_bits: 4}"), HasSubstr("'weight_bits' occurs twice"));
  EXPECT_THAT(refusal("quant: {smooth_quant: {alpha: 0, alpha: 1}}"), HasSubstr("'alpha' occurs twice"));
  EXPECT_THAT(refusal("a: ["), HasSubstr("not valid YAML"));
  EXPECT_THAT(refusal("other: {}"), HasSubstr("other"));
  EXPECT_THAT(refusal(""), HasSubstr("quant"));
}

const std::vector<std::string> kModules = {"layers.0.attn.q", "layers.1.attn.q", "layers.1.moe.experts.gate",
                                           "layers.10.attn.q", "layers.10.moe.experts.gate"};

TEST(SensitiveTest, NamesPrefixesAndPatterns) {
  const auto s = Sensitive::compile({"layers.1", "re:layers\\.10\\.moe"}, kModules).value();
  EXPECT_EQ(s.counts()[0].matches, 2);  // not layers.10
  EXPECT_EQ(s.counts()[1].matches, 1);
  EXPECT_TRUE(s.matches("layers.1.moe.experts.gate"));
  EXPECT_FALSE(s.matches("layers.10.attn.q"));
}

TEST(SensitiveTest, NoMatchIsAnError) {
  EXPECT_THAT(Sensitive::compile({"gate"}, kModules).error().message(), HasSubstr("'gate' matches no module"));
  EXPECT_THAT(Sensitive::compile({"re:("}, kModules).error().message(), HasSubstr("not a valid pattern"));
  EXPECT_THAT(Sensitive::compile({"layers.0.attn.p"}, kModules).error().message(), HasSubstr("did you mean"));
}

TEST(SensitiveTest, HostilePatternsEnd) {
  EXPECT_THAT(Sensitive::compile({"re:((([a-z0-9._]*)*)*)*#"}, kModules).error().message(), HasSubstr("matches no"));
  std::string deep = "re:" + std::string(60000, '(') + std::string(60000, ')'), many = "re:";
  for (int i = 0; i < 2000; ++i) many += "(a*)*";
  for (const std::string& p : {deep, many})
    EXPECT_THAT(Sensitive::compile({p}, kModules).error().message(), HasSubstr("characters"));
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
  add_error(w, q, s, 3, 3, &e);
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
    add_error_int4(w.data(), q.data(), s.data(), 2, 64, 32, &e);
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
    add_error_int4(w.data(), q.data(), s.data(), 64, 300, group, &e);
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
  const Path file = std::filesystem::temp_directory_path() / "mi_quant_test.jsonl";
  CalibrationRequest r{file, 10, 3, 100};
  ASSERT_TRUE(write_file(file, "{\"ids\": [1, 2, 3, 4]}\n\n{\"ids\": [5]}\n").ok());
  const auto set = load_calibration(r, nullptr, nullptr).value();
  EXPECT_THAT(set.sequences, testing::ElementsAre(testing::ElementsAre(1, 2, 3), testing::ElementsAre(5)));
  ASSERT_TRUE(write_file(file, "{\"ids\": [100]}\n").ok());
  EXPECT_THAT(load_calibration(r, nullptr, nullptr).error().message(), HasSubstr("vocabulary"));
  ASSERT_TRUE(write_file(file, "{\"text\": \"x\"}\n").ok());
  EXPECT_THAT(load_calibration(r, nullptr, nullptr).error().message(), HasSubstr("tokenizer"));
  ASSERT_TRUE(write_file(file, "").ok());
  EXPECT_FALSE(load_calibration(r, nullptr, nullptr).ok());
  std::filesystem::remove(file);
  r.file.clear();
  EXPECT_THAT(load_calibration(r, nullptr, nullptr)->source, HasSubstr("random"));
}

}  // namespace
}  // namespace mi::quant
