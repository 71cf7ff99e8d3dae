#include "tools/verify_passes.h"

#include <gtest/gtest.h>

#include "compiler/testing.h"
#include "quant/testing.h"

namespace mi::tools {
namespace {

PassesReport check(const std::string& matrices, const std::vector<ir::Pass>* passes = nullptr, const std::string& kv = "") {
  const TempDir dir;
  PassesOptions o;
  o.model = quant::testing::write_tiny(dir.path(), matrices);
  o.threads = 2;
  o.length = 70;
  o.kv_type = kv;
  o.passes = passes;
  auto r = verify_passes(o);
  EXPECT_TRUE(r.ok()) << (r.ok() ? "" : r.error().message());
  return r.ok() ? *r : PassesReport{};
}

// Gate and up change places where experts have them.
bool swap_gate_up(ir::Block& b, const ir::FusionRules&) {
  if (b.name != "moe") return false;
  bool changed = false;
  for (ir::Node& n : b.nodes)
    if (n.op == Op::kActivation && n.in.size() == 2) {
      std::swap(n.in[0], n.in[1]);
      changed = true;
    }
  return changed;
}

class PassesTest : public ::testing::TestWithParam<const char*> {};

TEST_P(PassesTest, EveryPassLeavesEqualBits) {
  const PassesReport r = check(GetParam());
  EXPECT_TRUE(r.ok()) << passes_text(r);
  EXPECT_GT(r.tokens, 100);
  int busy = 0, without = 0;
  for (const PassCheck& c : r.rows) {
    EXPECT_EQ(c.where, "") << c.what;
    EXPECT_EQ(c.max_logit_difference, 0) << c.what;
    EXPECT_EQ(c.same_tokens, 1) << c.what;
    without += c.what.starts_with("all but ");
    busy += !c.idle;
  }
  EXPECT_EQ(busy, 2 * without + 1);
  EXPECT_GE(without, 3) << passes_text(r);
  EXPECT_LT(r.rows[r.rows.size() - size_t(without) - 1].instructions, r.rows[0].instructions) << "nothing was fused";
}
INSTANTIATE_TEST_SUITE_P(Formats, PassesTest, ::testing::Values("f32", "bf16", "w8a8", "w4a8_g32"),
                         [](const auto& i) { return std::string(i.param); });

TEST(PassesTest, AWrongPassIsNamedWithItsFirstLayer) {
  // First, in the middle where another pass has work before and after it, and for both kinds of arithmetic.
  for (const char* matrices : {"f32", "w8a8"})
    for (const size_t at : {size_t(0), size_t(2)}) {
      std::vector<ir::Pass> list = ir::passes();
      list.insert(list.begin() + long(at), {"planted", "swaps gate and up", 1, swap_gate_up});
      const PassesReport r = check(matrices, &list);
      EXPECT_EQ(r.culprit, "planted") << passes_text(r);
      for (const PassCheck& c : r.rows) {
        if (c.what == "planted") {
          EXPECT_FALSE(c.ok);
          EXPECT_EQ(c.first_layer, 1) << c.where;
          EXPECT_EQ(c.first_token, 0) << c.where;
        }
        const bool its = c.what == "planted" || c.what == "all but planted";
        EXPECT_TRUE(its || c.ok) << c.what << ": " << c.where;
      }
      const std::string text = passes_text(r);
      EXPECT_NE(text.find("pass planted changes what the model says"), std::string::npos) << text;
      EXPECT_NE(text.find("layer 1, token 0 of text 0"), std::string::npos) << text;
      EXPECT_FALSE(passes_json(r)["ok"].get<bool>());
    }
}

TEST(PassesTest, AMissingModelIsNamed) {
  PassesOptions o;
  o.model = "/nowhere/mir";
  auto r = verify_passes(o);
  ASSERT_FALSE(r.ok());
  EXPECT_NE(r.error().message().find("/nowhere/mir"), std::string::npos) << r.error().message();
}

}  // namespace
}  // namespace mi::tools
