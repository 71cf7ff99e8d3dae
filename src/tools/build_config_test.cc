#include "tools/build_config.h"

#include <gtest/gtest.h>

#include "compiler/testing.h"

namespace mi::tools {
namespace {

const ir::Graph& graph() {
  static const ir::Graph g = ir::parse(compiler::testing::tiny_mir("w8a8")).value();
  return g;
}

TEST(BuildConfig, EveryKey) {
  compiler::BuildOptions o;
  const Status s = apply_build_config(R"(
build:
  opt_level: O1
  precision: bf16
  disable_passes: [fuse_qkv]
  strict: true
  allow_fallback: ["mlp.*"]
  fusion: {ignore: ["layers.1.attn.q", "re:layers\\.[02]\\.moe\\.experts"], same_precision_only: false, debug_shapes: true}
  expert_groups:
    - {layers: [1], size: 4}
    - {layers: [2], members: [[0, 2, 4], [1, 3, 5]]}
)",
                                      "build.yaml", graph(), &o);
  ASSERT_TRUE(s.ok()) << s.error().message();
  EXPECT_EQ(o.opt_level, 1);
  EXPECT_EQ(o.precision, "bf16");
  EXPECT_EQ(o.disabled_passes, std::vector<std::string>{"fuse_qkv"});
  EXPECT_TRUE(o.strict && o.debug_shapes && !o.rules.same_precision_only);
  EXPECT_EQ(o.allowed_fallbacks, std::vector<std::string>{"mlp.*"});
  EXPECT_TRUE(o.rules.ignores("layers.1.attn.q.weight"));
  EXPECT_FALSE(o.rules.ignores("layers.1.attn.q_norm.weight"));
  EXPECT_FALSE(o.rules.ignores("layers.0.attn.q.weight"));
  EXPECT_TRUE(o.rules.ignores("layers.2.moe.experts.up.weight"));
  ASSERT_EQ(o.expert_groups.size(), 2u);
  EXPECT_EQ(o.expert_groups[0].size, 4);
  EXPECT_EQ(o.expert_groups[1].members[1], (std::vector<int32_t>{1, 3, 5}));
  EXPECT_EQ(o.recorded.size(), 3u);
}

TEST(BuildConfig, WhatIsWrongIsNamed) {
  const std::pair<const char*, const char*> cases[] = {
      {"quant: {}", "unknown key 'quant'"},
      {"build: {opt_levle: O2}", "did you mean 'opt_level'"},
      {"build: {opt_level: O3}", "not 'O3'"},
      {"build: {precision: int8}", "not 'int8'"},
      {"build: {fusion: {debug_shape: true}}", "did you mean 'debug_shapes'"},
      {"build: {fusion: [a]}", "expected a mapping"},
      {"build: {fusion: {ignore: [\"layers.1.attn.qq.weight\"]}}", "did you mean 'layers.1.attn.q.weight'"},
      {"build: {fusion: {ignore: [\"re:layers\\\\.9\"]}}", "no weight or result"},
      {"build: {fusion: {ignore: [\"re:(\"]}}", "not a valid pattern"},
      {"build: {fusion: {same_precision_only: 3}}", "same_precision_only"},
      {"build: {expert_groups: 4}", "expected a list"},
      {"build: {expert_groups: [{size: 0}]}", "no number of experts"},
      {"build: {expert_groups: [{layers: [1]}]}", "either a size or its members"},
      {"build: {expert_groups: [{size: 2, members: [[0]]}]}", "either a size or its members"},
      {"build: {expert_groups: [{layer: [1], size: 2}]}", "unknown key 'layer'"},
      {"build: {expert_groups: [{members: [0, 1]}]}", "expected lists of experts"},
      {"build: {expert_groups: [{members: [[]]}]}", "expected lists of experts"},
      {"build: {expert_groups: [{layers: [-1], size: 2}]}", "no layer"},
      {"{}", "'build:' with its options is missing"},
      {"build: [", "build.yaml"},
  };
  for (const auto& [yaml, words] : cases) {
    compiler::BuildOptions o;
    const Status s = apply_build_config(yaml, "build.yaml", graph(), &o);
    ASSERT_FALSE(s.ok()) << yaml;
    EXPECT_EQ(s.error().code(), ErrorCode::kBadInput) << yaml;
    EXPECT_NE(s.error().message().find(words), std::string::npos) << yaml << ": " << s.error().message();
  }
}

}  // namespace
}  // namespace mi::tools
