// The keys of a recipe beyond the basic ones, and recipes that are written out and read again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "quant/search.h"
#include "quant/testing.h"

namespace mi::quant {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using testing::recipe;

std::string refusal(const std::string& yaml) {
  const auto r = parse_quant_config("quant: {" + yaml + "}", "q.yaml");
  return r.ok() ? "accepted" : r.error().message();
}

TEST(RecipeTest, Defaults) {
  const QuantConfig c = recipe("");
  EXPECT_EQ(c.rounding, Rounding::kAuto);
  EXPECT_EQ(c.activations, ActivationScheme::kPerToken);
  EXPECT_EQ(c.observer, Observer::kMinMax);
  EXPECT_TRUE(c.smooth);
  EXPECT_FALSE(c.search_alpha);
  EXPECT_FALSE(c.smooth_down);
  EXPECT_FALSE(c.sensitive_auto);
  EXPECT_TRUE(c.layers.empty());
}

TEST(RecipeTest, Rounding) {
  EXPECT_EQ(recipe("rounding: nearest").rounding, Rounding::kNearest);
  EXPECT_EQ(recipe("rounding: gptq").rounding, Rounding::kGptq);
  EXPECT_EQ(recipe("rounding: auto").rounding, Rounding::kAuto);
  EXPECT_EQ(recipe("rounding: none").rounding, Rounding::kNone);
  const QuantConfig c = recipe("rounding: gptq, gptq: {damping: 0.05, tokens: 100}");
  EXPECT_EQ(c.gptq_damping, 0.05);
  EXPECT_EQ(c.gptq_tokens, 100);
  EXPECT_EQ(recipe("gptq: {tokens: 7}").gptq_damping, QuantConfig{}.gptq_damping);
}

TEST(RecipeTest, Coverage) {
  const QuantConfig c = recipe("coverage: {min_tokens: 20, force: true}");
  EXPECT_EQ(c.min_expert_tokens, 20);
  EXPECT_TRUE(c.force_experts);
  EXPECT_EQ(recipe("coverage: {force: true}").min_expert_tokens, QuantConfig{}.min_expert_tokens);
}

TEST(RecipeTest, ActivationsInTheFilesOrder) {
  const QuantConfig c = recipe("activation_scheme: per_tensor, activations: {\"re:.*down\": per_token, a: per_tensor}");
  EXPECT_EQ(c.activations, ActivationScheme::kPerTensor);
  EXPECT_THAT(c.activation_layers, ElementsAre(Pair("re:.*down", ActivationScheme::kPerToken), Pair("a", ActivationScheme::kPerTensor)));
  EXPECT_EQ(recipe("activation_scheme: auto").activations, ActivationScheme::kAuto);
}

TEST(RecipeTest, Observers) {
  EXPECT_EQ(recipe("observer: mse").observer, Observer::kMse);
  const QuantConfig c = recipe("observer: percentile, percentile: 99.5");
  EXPECT_EQ(c.observer, Observer::kPercentile);
  EXPECT_EQ(c.percentile, 99.5);
  EXPECT_EQ(recipe("observer: percentile, percentile: 100").percentile, 100);
}

TEST(RecipeTest, Smoothing) {
  const QuantConfig c = recipe("smooth_quant: {alpha: search, down: true, layers: {3: 0.7, 0: 0}}");
  EXPECT_TRUE(c.smooth);
  EXPECT_TRUE(c.search_alpha);
  EXPECT_TRUE(c.smooth_down);
  EXPECT_THAT(c.layer_alpha, ElementsAre(Pair(0, 0.0), Pair(3, 0.7)));
  EXPECT_FALSE(recipe("smooth_quant: {enable: false}").smooth);
}

TEST(RecipeTest, SensitiveLayersAndBound) {
  const QuantConfig c = recipe("sensitive_layers: auto, bound: 0.5");
  EXPECT_TRUE(c.sensitive_auto);
  EXPECT_TRUE(c.sensitive_layers.empty());
  EXPECT_EQ(c.bound, 0.5);
  EXPECT_EQ(recipe("sensitive_layers: auto, bound: 0").bound, 0);
  EXPECT_FALSE(recipe("sensitive_layers: [auto]").sensitive_auto);
}

TEST(RecipeTest, FormatsOfLayers) {
  const QuantConfig c = recipe("layers: {a: float, b: int8, c: int4_g32, d: int4_g64, e: int4_g128, f: int4}");
  EXPECT_THAT(c.layers, ElementsAre(Pair("a", LayerFormat::kFloat), Pair("b", LayerFormat::kInt8), Pair("c", LayerFormat::kInt4G32),
                                    Pair("d", LayerFormat::kInt4G64), Pair("e", LayerFormat::kInt4G128), Pair("f", LayerFormat::kInt4)));
  for (const auto& [name, format] : c.layers)
    EXPECT_EQ(recipe("layers: {x: " + std::string(layer_format_name(format)) + "}").layers[0].second, format);
}

TEST(RecipeTest, Saturation) {
  EXPECT_TRUE(recipe("").saturated_layers.empty());
  const QuantConfig c = recipe("saturation: {percentile: 99.5, layers: [b, \"re:.*down\"]}");
  EXPECT_EQ(c.saturation_percentile, 99.5);
  EXPECT_THAT(c.saturated_layers, ElementsAre("b", "re:.*down"));
  EXPECT_FALSE(c.saturation_auto);
  const QuantConfig a = recipe("saturation: {layers: auto}");
  EXPECT_TRUE(a.saturation_auto && a.saturated_layers.empty());
  EXPECT_EQ(a.saturation_percentile, 99.9);
  EXPECT_THAT(refusal("saturation: auto"), HasSubstr("saturation: expected {percentile: 99.9"));
  EXPECT_THAT(refusal("saturation: {percentile: 99.9}"), HasSubstr("saturation.layers is missing"));
  EXPECT_THAT(refusal("saturation: {layers: down}"), HasSubstr("saturation.layers: expected a list of names or re: patterns, or auto"));
  EXPECT_THAT(refusal("saturation: {layers: [[a]]}"), HasSubstr("saturation.layers: every entry"));
  EXPECT_THAT(refusal("saturation: {layers: auto, percentil: 99}"), HasSubstr("did you mean 'percentile'"));
  EXPECT_THAT(refusal("saturation: {layers: auto, percentile: 100}"), HasSubstr("saturation.percentile must be above 50 and below 100"));
  EXPECT_THAT(refusal("saturation: {layers: auto, percentile: .nan}"), HasSubstr("saturation.percentile must be"));
  EXPECT_THAT(refusal("saturations: {layers: auto}"), HasSubstr("did you mean 'saturation'"));
}

TEST(RecipeTest, RefusesByName) {
  EXPECT_THAT(refusal("rounding: up"), HasSubstr("rounding must be auto, nearest, gptq or none"));
  EXPECT_THAT(refusal("rounding: up"), HasSubstr("not 'up'"));
  EXPECT_THAT(refusal("rounding: [gptq]"), HasSubstr("rounding: expected"));
  EXPECT_THAT(refusal("gptq: true"), HasSubstr("gptq: expected"));
  EXPECT_THAT(refusal("gptq: {dampening: 0.1}"), HasSubstr("did you mean 'damping'"));
  EXPECT_THAT(refusal("gptq: {damping: 0}"), HasSubstr("gptq.damping must be above 0"));
  EXPECT_THAT(refusal("gptq: {damping: .nan}"), HasSubstr("gptq.damping must be"));
  EXPECT_THAT(refusal("gptq: {damping: .inf}"), HasSubstr("gptq.damping must be"));
  EXPECT_THAT(refusal("gptq: {tokens: 0}"), HasSubstr("gptq.tokens must be between 1"));
  EXPECT_THAT(refusal("gptq: {tokens: 1, tokens: 2}"), HasSubstr("'tokens' occurs twice"));
  EXPECT_THAT(refusal("coverage: 8"), HasSubstr("coverage: expected"));
  EXPECT_THAT(refusal("coverage: {min_token: 8}"), HasSubstr("did you mean 'min_tokens'"));
  EXPECT_THAT(refusal("coverage: {min_tokens: -1}"), HasSubstr("coverage.min_tokens must be 0 or more"));
  EXPECT_THAT(refusal("activation_scheme: static"), HasSubstr("activation_scheme must be per_token, per_tensor or auto, not 'static'"));
  EXPECT_THAT(refusal("activations: per_token"), HasSubstr("activations: expected a mapping"));
  EXPECT_THAT(refusal("activations: {a: auto}"), HasSubstr("'a' must be per_token or per_tensor, not 'auto'"));
  EXPECT_THAT(refusal("activations: {a: per_token, a: per_tensor}"), HasSubstr("'a' occurs twice"));
  EXPECT_THAT(refusal("observer: max"), HasSubstr("observer must be minmax, percentile or mse, not 'max'"));
  EXPECT_THAT(refusal("percentile: 50"), HasSubstr("percentile must be above 50"));
  EXPECT_THAT(refusal("percentile: 100.1"), HasSubstr("at most 100"));
  EXPECT_THAT(refusal("percentile: .nan"), HasSubstr("percentile must be"));
  EXPECT_THAT(refusal("smooth_quant: {alpha: find}"), HasSubstr("a number, or search"));
  EXPECT_THAT(refusal("smooth_quant: {alpha: .nan}"), HasSubstr("between 0 and 1"));
  EXPECT_THAT(refusal("smooth_quant: {down: 2}"), HasSubstr("down: expected true or false"));
  EXPECT_THAT(refusal("smooth_quant: {layers: [0.5]}"), HasSubstr("smooth_quant.layers: expected a mapping"));
  EXPECT_THAT(refusal("smooth_quant: {layers: {x: 0.5}}"), HasSubstr("numbers of layers"));
  EXPECT_THAT(refusal("smooth_quant: {layers: {-1: 0.5}}"), HasSubstr("smooth_quant.layers"));
  EXPECT_THAT(refusal("smooth_quant: {layers: {1: 1.5}}"), HasSubstr("between 0 and 1"));
  EXPECT_THAT(refusal("smooth_quant: {layers: {1: .nan}}"), HasSubstr("between 0 and 1"));
  EXPECT_THAT(refusal("smooth_quant: {layers: {1: 0.5, 1: 0.6}}"), HasSubstr("'1' occurs twice"));
  EXPECT_THAT(refusal("sensitive_layers: all"), HasSubstr("or auto"));
  EXPECT_THAT(refusal("bound: -0.1"), HasSubstr("bound must be 0 or more"));
  EXPECT_THAT(refusal("bound: .nan"), HasSubstr("bound must be 0 or more"));
  EXPECT_THAT(refusal("layers: {a: int4_g16}"), HasSubstr("'a' must be float, int8, int4"));
  EXPECT_THAT(refusal("roudning: gptq"), HasSubstr("did you mean 'rounding'"));
  EXPECT_THAT(refusal("observers: mse"), HasSubstr("did you mean 'observer'"));
}

TEST(RecipeTest, WhatContradictsTheRestIsRefused) {
  EXPECT_THAT(refusal("bound: 7"), AllOf(HasSubstr("q.yaml: bound goes with"), HasSubstr("remove it")));
  EXPECT_THAT(refusal("saturation: {layers: auto}, bound: 7"), HasSubstr("bound goes with"));
  EXPECT_THAT(refusal("percentile: 60"), AllOf(HasSubstr("observer: percentile"), HasSubstr("remove it")));
  EXPECT_THAT(refusal("weight_bits: 010"), AllOf(HasSubstr("weight_bits"), HasSubstr("not '010'")));
  EXPECT_THAT(refusal("calibration_samples: 0x10"), HasSubstr("calibration_samples"));
  EXPECT_THAT(refusal("smooth_quant: {layers: {3: 0.7, 03: 0.2}}"), HasSubstr("numbers of layers"));
  EXPECT_THAT(parse_quant_config("quant: {}\n---\nquant: {weight_bits: 4}\n", "q.yaml").error().message(), HasSubstr("2 YAML documents"));
  EXPECT_EQ(recipe("bound: 7, activation_scheme: auto").notes.size(), 0u);
  EXPECT_EQ(recipe("bound: 0.01, percentile: 99.9").notes.size(), 0u);  // as older written recipes have it
}

TEST(RecipeTest, NothingIsRoundedAndSomethingIs) {
  EXPECT_THAT(parse_quant_config("quant: {rounding: none, layers: {lm_head: int8}}", "q.yaml").error().message(),
              HasSubstr("layers wants 'lm_head' at int8"));
  EXPECT_EQ(recipe("rounding: none, layers: {lm_head: float}").notes.size(), 0u);
}

TEST(RecipeTest, WhatHasNoEffectIsNoted) {
  const std::pair<const char*, const char*> cases[] = {
      {"observer: mse", "observer has no effect"},
      {"rounding: nearest, gptq: {damping: 5}", "gptq has no effect"},
      {"rounding: gptq, weight_scheme: per_tensor", "rounded to nearest"},
      {"saturation: {layers: []}", "saturation has no effect"},
      {"smooth_quant: {enable: false, down: true}", "enable is false"},
      {"rounding: none, weight_bits: 4", "leaves the model in float"},
      {"rounding: none, activation_scheme: per_tensor", "leaves the model in float"}};
  for (const auto& [yaml, note] : cases) {
    SCOPED_TRACE(yaml);
    const QuantConfig c = recipe(yaml);
    ASSERT_EQ(c.notes.size(), 1u);
    EXPECT_THAT(c.notes[0], AllOf(HasSubstr("q.yaml: "), HasSubstr(note)));
  }
  for (const char* yaml : {"", "smooth_quant: {enable: false}", "rounding: none", "observer: mse, activations: {a: per_tensor}"})
    EXPECT_EQ(recipe(yaml).notes.size(), 0u) << yaml;
}

TEST(RecipeTest, DamagedYamlIsNamedByItsPlace) {
  const auto message = [](const std::string& yaml) { return parse_quant_config(yaml, "q.yaml").error().message(); };
  EXPECT_THAT(message("quant:\n  ? [a, b]\n  : 1\n"), HasSubstr("line 2: a key has to be a word"));
  EXPECT_THAT(message(std::string(500000, '[')), HasSubstr("nested too deep"));
  EXPECT_THAT(message("quant: [\n"), AllOf(HasSubstr("q.yaml: not valid YAML: line "), ::testing::Not(HasSubstr("yaml-cpp"))));
}

// Field by field, so that a field that recipe_text() forgets is seen.
void expect_equal(const QuantConfig& a, const QuantConfig& b) {
  EXPECT_EQ(a.weight_bits, b.weight_bits);
  EXPECT_EQ(a.weights, b.weights);
  EXPECT_EQ(a.group_size, b.group_size);
  EXPECT_EQ(a.activations, b.activations);
  EXPECT_EQ(a.calibration_data, b.calibration_data);
  EXPECT_EQ(a.calibration_samples, b.calibration_samples);
  EXPECT_EQ(a.calibration_length, b.calibration_length);
  EXPECT_EQ(a.rounding, b.rounding);
  EXPECT_EQ(a.gptq_damping, b.gptq_damping);
  EXPECT_EQ(a.gptq_tokens, b.gptq_tokens);
  EXPECT_EQ(a.min_expert_tokens, b.min_expert_tokens);
  EXPECT_EQ(a.force_experts, b.force_experts);
  EXPECT_EQ(a.observer, b.observer);
  EXPECT_EQ(a.percentile, b.percentile);
  EXPECT_EQ(a.activation_layers, b.activation_layers);
  EXPECT_EQ(a.saturation_percentile, b.saturation_percentile);
  EXPECT_EQ(a.saturated_layers, b.saturated_layers);
  EXPECT_EQ(a.saturation_auto, b.saturation_auto);
  EXPECT_EQ(a.smooth, b.smooth);
  EXPECT_EQ(a.smooth_alpha, b.smooth_alpha);
  EXPECT_EQ(a.search_alpha, b.search_alpha);
  EXPECT_EQ(a.layer_alpha, b.layer_alpha);
  EXPECT_EQ(a.smooth_down, b.smooth_down);
  EXPECT_EQ(a.sensitive_layers, b.sensitive_layers);
  EXPECT_EQ(a.sensitive_auto, b.sensitive_auto);
  EXPECT_EQ(a.bound, b.bound);
  EXPECT_EQ(a.layers, b.layers);
}

TEST(RecipeTest, WrittenAndReadAgainItIsTheSame) {
  for (const std::string& yaml : {
           std::string(""),
           std::string("weight_bits: 4, group_size: 32, rounding: nearest"),
           std::string("weight_scheme: per_tensor, activation_scheme: per_tensor, observer: percentile, percentile: 99.99"),
           std::string("rounding: gptq, gptq: {damping: 0.0123456789, tokens: 17}, observer: mse"),
           std::string("coverage: {min_tokens: 0, force: true}"),
           std::string("rounding: none, smooth_quant: {down: true}"),
           std::string("activation_scheme: auto, sensitive_layers: auto, bound: 0.003"),
           std::string("saturation: {percentile: 99.95, layers: [b, \"re:.*\\\\.down$\", \"a: b # c\"]}"),
           std::string("saturation: {percentile: 98, layers: auto}"),
           std::string("activations: {b: per_token, a: per_tensor, \"re:a\\\\.b\\\"c\": per_token}"),
           std::string("calibration_data: \"/some where/ca\\\"li\\\\b.jsonl\", calibration_samples: 3, calibration_length: 5"),
           std::string("smooth_quant: {enable: false, alpha: 0.1}"),
           std::string("smooth_quant: {alpha: search, down: true, layers: {2: 0.3333333333333333, 11: 1}}"),
           std::string("sensitive_layers: [b, \"re:.*\\\\.down$\", \"a: b # c\"]"),
           std::string("layers: {z: int4, a: float, \"re:.*q\": int8, b: int4_g32, c: int4_g64, d: int4_g128}, group_size: 64"),
       }) {
    const QuantConfig c = recipe(yaml);
    const std::string text = recipe_text(c, {"a comment", "quant: {weight_bits: 3}"});
    const auto again = parse_quant_config(text, "again");
    ASSERT_TRUE(again.ok()) << again.error().message() << "\n" << text;
    SCOPED_TRACE(yaml);
    expect_equal(c, *again);
    EXPECT_EQ(recipe_text(*again, {"a comment", "quant: {weight_bits: 3}"}), text);
  }
}

}  // namespace
}  // namespace mi::quant
