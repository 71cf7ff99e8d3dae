// config.json: spellings, defaults, conflicts, ropes, patterns of layers.

#include "model/config.h"

#include <gmock/gmock.h>

#include "model/arch.h"
#include "model/pattern.h"
#include "model/testing.h"

namespace mi::model {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct Resolution {
  ArchSpec arch;
  std::map<std::string, std::string> source;  // of each value
};
Result<Resolution> resolve(const Json& config) {
  MI_TRY(const Recipe r, find_recipe(config["model_type"].get<std::string>(), "config.json"));
  MI_TRY(Config c, Config::create(config, "config.json", r.keys, r.text_config));
  Resolution out;
  MI_TRY(out.arch, resolve_arch(r, c));
  for (const auto& v : c.resolved()) out.source[v.name] = v.source;
  return out;
}
Json tiny(const Json& changes) {
  Json c = Tiny{}.config();
  for (const auto& [k, v] : changes.items()) c[k] = v;
  return c;
}
double theta_of(const RopeSpec& r) { return std::pow(double(r.inv_freq[1]), -double(r.rotary_dim) / 2); }

TEST(Rope, NestedBaseAloneIsTaken) {
  Json c = tiny({{"rope_parameters", {{"rope_theta", 1000000.0}, {"rope_type", "default"}}}});
  c.erase("rope_theta");
  const auto r = resolve(c);
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_NEAR(theta_of(r->arch.ropes[0]), 1e6, 1);
  EXPECT_EQ(r->source.at("rope_theta"), "rope_parameters.rope_theta");
}

TEST(Rope, NestedAndTopLevelBaseThatDifferAreRefused) {
  const auto r = resolve(tiny({{"rope_theta", 10000}, {"rope_parameters", {{"rope_theta", 500000}}}}));
  EXPECT_THAT(refusal(r), AllOf(HasSubstr("rope_parameters.rope_theta is 500000"), HasSubstr("rope_theta is 10000")));
  EXPECT_TRUE(resolve(tiny({{"rope_theta", 500000.0}, {"rope_parameters", {{"rope_theta", 500000}}}})).ok());
}

TEST(Rope, ScalingTypeUnderEitherName) {
  for (const char* key : {"type", "rope_type"}) {
    const auto r = resolve(tiny({{"rope_scaling", {{key, "linear"}, {"factor", 4.0}}}}));
    ASSERT_TRUE(r.ok()) << r.error().message();
    EXPECT_FLOAT_EQ(r->arch.ropes[0].inv_freq[0], 0.25f);
  }
  EXPECT_THAT(refusal(resolve(tiny({{"rope_scaling", {{"type", "linear"}, {"rope_type", "yarn"}, {"factor", 4.0}}}}))),
              HasSubstr("rope_type"));
}

TEST(Rope, NullScalingIsNone) {
  const auto r = resolve(tiny({{"rope_scaling", nullptr}}));
  ASSERT_TRUE(r.ok());
  EXPECT_EQ(r->arch.ropes[0].inv_freq[0], 1.0f);
  EXPECT_EQ(r->arch.ropes[0].attention_factor, 1.0f);
  EXPECT_EQ(resolve(tiny({{"rope_scaling", {{"rope_type", nullptr}}}}))->arch.ropes[0].inv_freq[0], 1.0f);
}

TEST(Rope, UnknownScalingIsRefused) {
  EXPECT_THAT(refusal(resolve(tiny({{"rope_scaling", {{"type", "dynamic"}, {"factor", 2}}}}))), HasSubstr("dynamic"));
}

TEST(Rope, ExtremeNumbersAreRefused) {
  EXPECT_THAT(refusal(resolve(tiny({{"partial_rotary_factor", 1e300}}))), HasSubstr("would be rotated"));
  EXPECT_THAT(refusal(resolve(tiny({{"rope_theta", 1e-300}}))), HasSubstr("not finite"));
  EXPECT_THAT(refusal(resolve(tiny({{"rope_scaling", {{"type", "linear"}, {"factor", 1e-320}}}}))),
              HasSubstr("not finite"));
}

TEST(Rope, YarnLeavesShortWavesAndDividesLongOnes) {
  const Json scaling = {{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 64}};
  const auto r = resolve(tiny({{"head_dim", 64}, {"rope_scaling", scaling}}));
  ASSERT_TRUE(r.ok()) << r.error().message();
  const auto plain = resolve(tiny({{"head_dim", 64}}))->arch.ropes[0].inv_freq;
  const RopeSpec& y = r->arch.ropes[0];
  EXPECT_FLOAT_EQ(y.inv_freq.front(), plain.front());
  EXPECT_FLOAT_EQ(y.inv_freq.back(), plain.back() / 4);
  EXPECT_FLOAT_EQ(y.attention_factor, float(0.1 * std::log(4.0) + 1));
  Json with_mscale = scaling;
  with_mscale["mscale"] = 1.0;
  with_mscale["mscale_all_dim"] = 1.0;
  EXPECT_EQ(resolve(tiny({{"rope_scaling", with_mscale}}))->arch.ropes[0].attention_factor, 1.0f);
}

TEST(Rope, Llama3) {
  const Json scaling = {{"rope_type", "llama3"},
                        {"factor", 8.0},
                        {"low_freq_factor", 1.0},
                        {"high_freq_factor", 4.0},
                        {"original_max_position_embeddings", 8192}};
  const auto r = resolve(tiny({{"head_dim", 64}, {"rope_theta", 500000.0}, {"rope_scaling", scaling}}));
  ASSERT_TRUE(r.ok()) << r.error().message();
  const auto plain = resolve(tiny({{"head_dim", 64}, {"rope_theta", 500000.0}}))->arch.ropes[0].inv_freq;
  EXPECT_EQ(r->arch.ropes[0].inv_freq[0], plain[0]);
  EXPECT_FLOAT_EQ(r->arch.ropes[0].inv_freq.back(), plain.back() / 8);
  Json lacking = scaling;
  lacking.erase("low_freq_factor");
  EXPECT_THAT(refusal(resolve(tiny({{"rope_scaling", lacking}}))), HasSubstr("low_freq_factor"));
}

TEST(Rope, KeyedByLayerType) {
  Json c = load_json(data("goldens") / "gpt_oss" / "config.json");
  const Json yarn = c["rope_parameters"];
  c["rope_parameters"] = {{"full_attention", yarn},
                          {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 10000.0}}}};
  const auto r = resolve(c);
  ASSERT_TRUE(r.ok()) << r.error().message();
  ASSERT_EQ(r->arch.ropes.size(), 2u);
  EXPECT_EQ(r->arch.ropes[size_t(r->arch.layer[0].rope)].layer_type, "sliding_attention");
  EXPECT_EQ(r->arch.ropes[size_t(r->arch.layer[1].rope)].layer_type, "full_attention");
  c["rope_parameters"].erase("sliding_attention");
  c["rope_parameters"]["other"] = yarn;
  EXPECT_THAT(refusal(resolve(c)), HasSubstr("sliding_attention"));
}

TEST(Rope, RotaryDimAndPartialFactorMustAgree) {
  Json c = load_json(data("goldens") / "minimax_m2" / "config.released.json");
  EXPECT_EQ(resolve(c)->arch.ropes[0].rotary_dim, 8);
  c["partial_rotary_factor"] = 1.0;
  EXPECT_THAT(refusal(resolve(c)), AllOf(HasSubstr("rotary_dim"), HasSubstr("partial_rotary_factor")));
  // M3 takes partial_rotary_factor; a rotary_dim that says something else is no silent matter.
  Json m3 = load_json(data("goldens") / "minimax_m3" / "config.released.json");
  m3["text_config"].erase("partial_rotary_factor");
  EXPECT_THAT(refusal(resolve(m3)), HasSubstr("rotary_dim"));
}

TEST(Config, SpellingsThatDisagreeAreRefused) {
  EXPECT_THAT(refusal(resolve(tiny({{"num_local_experts", 8}}))),
              AllOf(HasSubstr("num_experts is 4"), HasSubstr("num_local_experts is 8")));
  EXPECT_TRUE(resolve(tiny({{"num_local_experts", 4}})).ok());
}

TEST(Config, NestedAndTopLevelThatDisagreeAreRefused) {
  Json c = load_json(data("goldens") / "minimax_m3" / "config.json");
  c["hidden_size"] = 65;
  EXPECT_THAT(refusal(resolve(c)), AllOf(HasSubstr("hidden_size is 65"), HasSubstr("text_config.hidden_size is 64")));
}

TEST(Config, NestedConfigMayHoldOnlyDifferences) {
  const Json c = {{"model_type", "minimax_m3_vl"},
                  {"text_config",
                   {{"num_hidden_layers", 4},
                    {"sparse_attention_config",
                     {{"sparse_num_index_heads", 4},
                      {"sparse_index_dim", 128},
                      {"sparse_block_size", 128},
                      {"sparse_topk_blocks", 16},
                      {"sparse_attention_freq", {0, 0, 0, 1}}}}}}};
  const auto r = resolve(c);
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_EQ(r->arch.hidden, 6144);
  EXPECT_EQ(r->arch.moe.route.scale, 2.0f);
  EXPECT_EQ(r->arch.moe.route.experts, 128);
  EXPECT_FALSE(r->arch.layer[2].moe);
  EXPECT_TRUE(r->arch.layer[3].moe && r->arch.layer[3].indexed);
}

TEST(Config, WrongTypesAndMissingKeysAreNamed) {
  EXPECT_THAT(refusal(resolve(tiny({{"hidden_size", "32"}}))),
              AllOf(HasSubstr("hidden_size"), HasSubstr("expected an integer, found a string")));
  EXPECT_THAT(refusal(resolve(tiny({{"num_attention_heads", 0}}))), HasSubstr("num_attention_heads is 0"));
  EXPECT_THAT(refusal(resolve(tiny({{"norm_topk_prob", 1}}))),
              AllOf(HasSubstr("norm_topk_prob"), HasSubstr("true or false")));
  EXPECT_THAT(refusal(resolve(tiny({{"rms_norm_eps", "small"}}))), HasSubstr("rms_norm_eps"));
  EXPECT_THAT(refusal(resolve(tiny({{"hidden_act", "snake"}}))), AllOf(HasSubstr("hidden_act"), HasSubstr("snake")));
  EXPECT_THAT(refusal(resolve(tiny({{"head_dim", int64_t(1) << 40}}))), HasSubstr("head_dim"));
  Json c = Tiny{}.config();
  c.erase("num_experts_per_tok");
  c["num_expert_per_tok"] = 2;
  EXPECT_THAT(refusal(resolve(c)), AllOf(HasSubstr("num_experts_per_tok is missing"), HasSubstr("num_expert_per_tok")));
}

TEST(Config, HeadsThatDoNotDivideAreNamed) {
  EXPECT_THAT(refusal(resolve(tiny({{"num_attention_heads", 3}, {"num_key_value_heads", 2}}))),
              HasSubstr("num_attention_heads is 3"));
}

TEST(Config, FamilyDefaultsHold) {
  Json c = Tiny{}.config();
  for (const char* k : {"norm_topk_prob", "rope_theta", "rms_norm_eps", "num_key_value_heads", "head_dim"}) c.erase(k);
  const auto qwen = resolve(c);
  ASSERT_TRUE(qwen.ok()) << qwen.error().message();
  EXPECT_FALSE(qwen->arch.moe.route.renorm);
  EXPECT_EQ(qwen->arch.eps, 1e-6f);
  EXPECT_EQ(qwen->arch.attention.kv_heads, 2);
  EXPECT_EQ(qwen->arch.attention.head_dim, 16);
  c["model_type"] = "mixtral";
  const auto mixtral = resolve(c);
  ASSERT_TRUE(mixtral.ok()) << mixtral.error().message();
  EXPECT_TRUE(mixtral->arch.moe.route.renorm);
  EXPECT_EQ(mixtral->arch.eps, 1e-5f);
  EXPECT_NEAR(theta_of(mixtral->arch.ropes[0]), 1e6, 1);
  EXPECT_EQ(mixtral->arch.moe.width, 48);  // its intermediate_size is that of an expert
}

TEST(Config, WhatARecipeDoesNotStandForIsRefused) {
  Json c = load_json(data("goldens") / "minimax_m3" / "config.released.json");
  c["text_config"]["attention_output_gate"] = true;
  EXPECT_THAT(refusal(resolve(c)), HasSubstr("attention_output_gate is true"));
}

TEST(Config, DeadSlidingWindowStaysDead) {
  EXPECT_EQ(resolve(tiny({{"sliding_window", 8}}))->arch.layer[0].window, 0);
  EXPECT_EQ(resolve(tiny({{"sliding_window", 8}, {"use_sliding_window", true}}))->arch.layer[0].window, 8);
}

std::vector<bool> moe_layers(const ArchSpec& a) {
  std::vector<bool> v;
  for (const LayerSpec& l : a.layer) v.push_back(l.moe);
  return v;
}

TEST(Pattern, SparseStepAndDenseList) {
  const auto r = resolve(tiny({{"num_hidden_layers", 6}, {"decoder_sparse_step", 2}, {"mlp_only_layers", {3}}}));
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_EQ(moe_layers(r->arch), (std::vector<bool>{false, true, false, false, false, true}));
}

TEST(Pattern, TwoStatementsMustAgree) {
  const Json agree = {{"num_hidden_layers", 2}, {"decoder_sparse_step", 2}, {"mlp_layer_types", {"dense", "sparse"}}};
  EXPECT_EQ(moe_layers(resolve(tiny(agree))->arch), (std::vector<bool>{false, true}));
  Json disagree = agree;
  disagree["mlp_layer_types"] = {"sparse", "sparse"};
  EXPECT_THAT(refusal(resolve(tiny(disagree))),
              AllOf(HasSubstr("decoder_sparse_step"), HasSubstr("mlp_layer_types"), HasSubstr("layer 0")));
}

TEST(Pattern, ListsOfAnotherLengthAndUnknownKindsAreNamed) {
  EXPECT_THAT(refusal(resolve(tiny({{"mlp_layer_types", {"sparse", "sparse"}}}))), HasSubstr("2 entries for 1 layers"));
  EXPECT_THAT(refusal(resolve(tiny({{"mlp_layer_types", {"mamba"}}}))), HasSubstr("mamba"));
}

TEST(Pattern, IntervalsOfErnie) {
  Json c = load_json(data("goldens") / "ernie4_5_moe" / "config.json");
  c["num_hidden_layers"] = 6;
  c["moe_layer_start_index"] = 1;
  c["moe_layer_end_index"] = -1;
  c["moe_layer_interval"] = 2;
  EXPECT_EQ(moe_layers(resolve(c)->arch), (std::vector<bool>{false, true, false, true, false, true}));
}

TEST(TokenIds, NumbersThatNoIdCanBeAreNotWrappedAround) {
  EXPECT_THAT(refusal(resolve(tiny({{"eos_token_id", UINT64_MAX}}))), HasSubstr("eos_token_id"));
  EXPECT_THAT(refusal(resolve(tiny({{"eos_token_id", {1, UINT64_MAX - 1}}}))), HasSubstr("eos_token_id"));
  EXPECT_EQ(resolve(tiny({{"pad_token_id", UINT64_MAX - 4}}))->arch.pad_id, -1);
}

TEST(Expression, ExactArithmetic) {
  KeySpecs keys;
  keys["a"].keys = {"a"};
  keys["b"].keys = {"b"};
  auto c = Config::create(Json{{"a", 6}, {"b", 4}}, "config.json", keys, {});
  EXPECT_EQ(*c->eval("2 * a + b / 2"), 14);
  EXPECT_EQ(*c->eval("(a - b) * 3"), 6);
  EXPECT_THAT(refusal(c->eval("a / b")), HasSubstr("does not divide"));
  for (const char* bad : {"", "a +", "(a", "a b", "a $ b", "a / 0"}) EXPECT_FALSE(c->eval(bad).ok()) << bad;
  EXPECT_THAT(refusal(c->eval("c")), HasSubstr("'c'"));
}

}  // namespace
}  // namespace mi::model
