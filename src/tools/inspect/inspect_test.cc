#include <gtest/gtest.h>

#include "compiler/build.h"
#include "compiler/testing.h"
#include "quant/testing.h"
#include "tools/inspect/card.h"
#include "tools/inspect/model_diff.h"

namespace mi::tools {
namespace {

using quant::testing::write_tiny;

Subject open(const Path& dir) {
  auto s = open_subject(dir);
  EXPECT_TRUE(s.ok()) << (s.ok() ? "" : s.error().message());
  return s.ok() ? std::move(*s) : Subject{};
}

Path build(const Path& mir, const Path& out) {
  compiler::BuildOptions o;
  o.model = mir;
  o.output = out;
  auto r = compiler::build_engine(o);
  EXPECT_TRUE(r.ok()) << (r.ok() ? "" : r.error().message());
  return out;
}

std::string fact(const Card& c, const std::string& label) {
  std::string s;
  for (const auto& [l, v] : c.facts)
    if (l == label) s += v + "\n";
  return s;
}

TEST(InspectTest, CardOfAMirAndOfItsEngine) {
  const TempDir dir;
  const Path mir = write_tiny(dir.path(), "w8a8"), engine = build(mir, dir / "engine");
  const Card a = make_card(open(mir), int64_t(1) << 30), b = make_card(open(engine), int64_t(1) << 30);
  for (const Card* c : {&a, &b}) {
    EXPECT_EQ(fact(*c, "shape"), "3 layers, hidden 24, vocabulary 50, 128 positions\n");
    EXPECT_EQ(fact(*c, "experts"), "6, 2 of them for each token\n");
    EXPECT_EQ(fact(*c, "attention"), "4 heads, 2 of keys and values, 8 wide\n");
    EXPECT_EQ(c->context_bf16, 128);
  }
  EXPECT_EQ(a.stats.total_params, b.stats.total_params);
  EXPECT_EQ(a.stats.active_params, b.stats.active_params);
  // 2 MoE layers of 6 experts, 3 matrices of 20 x 24 each.
  int64_t experts = 0;
  for (const ir::WeightGroup& g : a.stats.groups)
    if (g.mark == ir::Mark::kExpert) {
      EXPECT_EQ(g.format, "w8a8");
      experts += g.params;
    }
  EXPECT_EQ(experts, 2 * 6 * 3 * 20 * 24);
  EXPECT_NE(fact(b, "pass").find("fuse_qkv"), std::string::npos);
  EXPECT_EQ(card_json(b)["parameters"], b.stats.total_params);
}

TEST(InspectTest, LittleMemoryMeansShortContexts) {
  const TempDir dir;
  const Subject s = open(write_tiny(dir.path(), "bf16"));
  const Card all = make_card(s, int64_t(1) << 30);
  const int64_t weights = all.stats.weight_bytes;
  // Room for 40 tokens at bf16 when serve may take 60 % of it.
  const Card c = make_card(s, weights + int64_t(double(40 * all.kv_bf16) / 0.6) + 1);
  EXPECT_EQ(c.context_bf16, 40);
  EXPECT_GT(c.context_int8, 40);
  EXPECT_EQ(make_card(s, weights / 2).context_bf16, 0);
}

TEST(InspectTest, NothingToInspectIsSaid) {
  const TempDir dir;
  auto s = open_subject(dir.path());
  ASSERT_FALSE(s.ok());
  EXPECT_NE(s.error().message().find("config.json"), std::string::npos);
  EXPECT_EQ(s.error().code(), ErrorCode::kBadInput);
}

TEST(InspectTest, ComparingFindsOneChangedNumberAndOtherFormats) {
  const TempDir one, two, three;
  const Path a = write_tiny(one.path()), same = write_tiny(two.path());
  const Path changed = write_tiny(three.path(), "bf16", [](const std::string& name, std::vector<float>& v) {
    if (name == "layers.2.attn.o.weight") v[3] += 1;
  });
  EXPECT_TRUE(diff_models(open(a), open(same), 1 << 30).same());
  const ModelDiff c = diff_models(open(a), open(changed), 1 << 30);
  EXPECT_EQ(c.other_bytes, std::vector<std::string>{"layers.2.attn.o.weight"});
  EXPECT_TRUE(c.weights.empty() && c.ops.empty() && c.facts.empty());
  EXPECT_FALSE(c.same());

  const TempDir four;
  const ModelDiff q = diff_models(open(a), open(write_tiny(four.path(), "w8a8")), 1 << 30);
  EXPECT_FALSE(q.weights.empty());
  EXPECT_FALSE(q.ops.empty());  // quantize nodes
  for (const auto& l : q.weights) EXPECT_TRUE(l.a.starts_with("bf16") && l.b.starts_with("w8a8")) << l.what;
  EXPECT_NE(model_diff_text(q).find("quantize"), std::string::npos);
}

TEST(InspectTest, ComparingEnginesFindsTheChangedMatrix) {
  const TempDir one, two;
  const Path a = build(write_tiny(one.path()), one / "engine");
  const Path b = build(write_tiny(two.path(), "bf16",
                                  [](const std::string& name, std::vector<float>& v) {
                                    if (name == "layers.1.moe.experts.up.weight") v[0] += 1;
                                  }),
                       two / "engine");
  const ModelDiff c = diff_models(open(a), open(b), 1 << 30);
  ASSERT_EQ(c.other_bytes.size(), 1u) << model_diff_text(c);
  EXPECT_NE(c.other_bytes[0].find("layers.1.moe.experts.up.weight"), std::string::npos);
  EXPECT_FALSE(diff_models(open(a), open(one / "mir"), 1 << 30).bytes_compared);
}

}  // namespace
}  // namespace mi::tools
