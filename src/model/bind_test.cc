// From checkpoint tensors to canonical weights: dialects, packed layouts, tied heads, damaged numbers, accounting.

#include "model/bind.h"

#include <gmock/gmock.h>

#include <cmath>

#include "model/testing.h"

namespace mi::model {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

constexpr const char* kMlp = "model.layers.0.mlp.";

// The experts of a layer packed into gate_up_proj and down_proj; in_major: [E, in, out].
void pack_experts(TensorMap* t, const Tiny& tiny, int64_t layer, bool in_major) {
  const std::string p = fmt::format("model.layers.{}.mlp.experts.", layer);
  const int64_t h = tiny.hidden, w = tiny.width;
  Tensor gate_up = make_tensor(DType::kBF16, in_major ? Shape{tiny.experts, h, 2 * w} : Shape{tiny.experts, 2 * w, h});
  Tensor down = make_tensor(DType::kBF16, in_major ? Shape{tiny.experts, w, h} : Shape{tiny.experts, h, w});
  const auto put = [&](Tensor& to, int64_t e, int64_t row, int64_t col, uint16_t bits) {
    const int64_t rows = to.shape[1], cols = to.shape[2];
    reinterpret_cast<uint16_t*>(to.data.data())[e * rows * cols + (in_major ? col * cols + row : row * cols + col)] =
        bits;
  };
  for (int64_t e = 0; e < tiny.experts; ++e) {
    for (const bool up : {false, true}) {
      const std::string name = fmt::format("{}{}.{}_proj.weight", p, e, up ? "up" : "gate");
      const auto* bits = reinterpret_cast<const uint16_t*>((*t)[name].data.data());
      for (int64_t r = 0; r < w; ++r)
        for (int64_t c = 0; c < h; ++c) put(gate_up, e, r + (up ? w : 0), c, bits[r * h + c]);
      t->erase(name);
    }
    const std::string name = fmt::format("{}{}.down_proj.weight", p, e);
    const auto* bits = reinterpret_cast<const uint16_t*>((*t)[name].data.data());
    for (int64_t r = 0; r < h; ++r)
      for (int64_t c = 0; c < w; ++c) put(down, e, r, c, bits[r * w + c]);
    t->erase(name);
  }
  (*t)[p + "gate_up_proj"] = std::move(gate_up);
  (*t)[p + "down_proj"] = std::move(down);
}

// "experts.3.gate_proj.weight" -> "experts.gate_proj.3.weight"
void projection_first(TensorMap* t, int64_t layer, int64_t experts) {
  const std::string p = fmt::format("model.layers.{}.mlp.experts.", layer);
  for (int64_t e = 0; e < experts; ++e)
    for (const char* proj : {"gate_proj", "up_proj", "down_proj"}) {
      auto node = t->extract(fmt::format("{}{}.{}.weight", p, e, proj));
      node.key() = fmt::format("{}{}.{}.weight", p, proj, e);
      t->insert(std::move(node));
    }
}

std::string weights_of(const Path& mir) { return read_text(mir / "weights" / "00001.safetensors"); }

TEST(Layout, PackedExpertsInEitherOrderAreTheSameModel) {
  Tiny tiny;
  tiny.width = 24;
  TempDir tmp;
  write_checkpoint(tmp / "plain", tiny.config(), tiny.tensors());
  ASSERT_TRUE(export_to(tmp / "plain", tmp / "plain-mir").ok());
  for (const bool in_major : {false, true}) {
    TensorMap t = tiny.tensors();
    pack_experts(&t, tiny, 0, in_major);
    const std::string name = in_major ? "in" : "out";
    write_checkpoint(tmp / name, tiny.config(), t);
    const auto r = export_to(tmp / name, tmp / (name + "-mir"));
    ASSERT_TRUE(r.ok()) << r.error().message();
    EXPECT_EQ(weights_of(tmp / (name + "-mir")), weights_of(tmp / "plain-mir"));
  }
}

TEST(Layout, ShapeThatCannotTellIsRefused) {
  Tiny tiny;
  tiny.width = 16;  // hidden = 2 width: gate_up is [E, 32, 32] either way
  TensorMap t = tiny.tensors();
  pack_experts(&t, tiny, 0, true);
  TempDir tmp;
  write_checkpoint(tmp.path(), tiny.config(), t);
  EXPECT_THAT(refusal(check(tmp.path())), AllOf(HasSubstr("experts.gate_up_proj"), HasSubstr("cannot tell")));
}

TEST(Layout, PackedScalesWithoutAFormatAreLeftOver) {
  Tiny tiny;
  tiny.width = 24;
  TensorMap t = tiny.tensors();
  pack_experts(&t, tiny, 0, false);
  t["model.layers.0.mlp.experts.gate_up_proj_scale_inv"] = random_bf16({4, 1, 1}, 3);
  TempDir tmp;
  write_checkpoint(tmp.path(), tiny.config(), t);
  EXPECT_THAT(refusal(check(tmp.path())), HasSubstr("gate_up_proj_scale_inv"));
}

TEST(Layout, PackedOfAnotherSizeIsNamed) {
  Tiny tiny;
  tiny.width = 24;
  TensorMap t = tiny.tensors();
  pack_experts(&t, tiny, 0, false);
  TempDir tmp;
  Json c = tiny.config();
  c["moe_intermediate_size"] = 20;
  write_checkpoint(tmp.path(), c, t);
  EXPECT_THAT(refusal(check(tmp.path())), AllOf(HasSubstr("gate_up_proj"), HasSubstr("[4, 48, 32]"), HasSubstr("40")));
}

TEST(Dialect, EachLayerMaySpeakItsOwn) {
  Tiny tiny;
  tiny.layers = 3;
  tiny.width = 24;
  TempDir tmp;
  write_checkpoint(tmp / "plain", tiny.config(), tiny.tensors());
  ASSERT_TRUE(export_to(tmp / "plain", tmp / "plain-mir").ok());

  TensorMap t = tiny.tensors(), wrapped;
  projection_first(&t, 1, tiny.experts);
  pack_experts(&t, tiny, 2, false);
  for (auto& [name, tensor] : t) wrapped["language_model." + name] = std::move(tensor);
  write_checkpoint(tmp / "mixed", tiny.config(), wrapped);
  const auto r = export_to(tmp / "mixed", tmp / "mixed-mir");
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_EQ(weights_of(tmp / "mixed-mir"), weights_of(tmp / "plain-mir"));
  EXPECT_THAT(r->explain, AllOf(HasSubstr("language_model.model.layers.1.mlp.experts.gate_proj.0.weight"),
                                HasSubstr("language_model.model.layers.2.mlp.experts.gate_up_proj")));

  wrapped.erase("language_model.model.layers.1.mlp.experts.up_proj.3.weight");
  write_checkpoint(tmp / "mixed", tiny.config(), wrapped);
  EXPECT_THAT(refusal(check(tmp / "mixed")), HasSubstr("language_model.model.layers.1.mlp.experts.up_proj.3.weight"));
}

TEST(Dialect, OneWeightUnderTwoNamesIsRefused) {
  const Tiny tiny;
  TensorMap t = tiny.tensors();
  t["language_model.model.norm.weight"] = t["model.norm.weight"];
  TempDir tmp;
  write_checkpoint(tmp.path(), tiny.config(), t);
  EXPECT_THAT(refusal(check(tmp.path())), HasSubstr("language_model.model.norm.weight"));
}

TEST(Accounting, LeftOverTensorsAreNamed) {
  const Tiny tiny;
  TensorMap t = tiny.tensors();
  t["model.layers.0.self_attn.q_proj.bias"] = random_bf16({32}, 1);
  t["model.layers.1.self_attn.q_proj.weight"] = random_bf16({32, 32}, 1);
  TempDir tmp;
  write_checkpoint(tmp.path(), tiny.config(), t);
  EXPECT_THAT(refusal(check(tmp.path())), AllOf(HasSubstr("model.layers.0.self_attn.q_proj.bias"),
                                                HasSubstr("model.layers.1.self_attn.q_proj.weight")));
}

TEST(Accounting, ExpertsBeyondTheConfigAreLeftOver) {
  Tiny tiny;
  TensorMap t = tiny.tensors();
  tiny.experts = 3;
  t["model.layers.0.mlp.gate.weight"] = random_bf16({3, 32}, 1);
  TempDir tmp;
  write_checkpoint(tmp.path(), tiny.config(), t);
  EXPECT_THAT(refusal(check(tmp.path())), HasSubstr("experts.3."));
}

TEST(Accounting, VisionAndExtraLayersAreSkippedWithACount) {
  const auto m3 = check(data("goldens") / "minimax_m3");
  ASSERT_TRUE(m3.ok());
  EXPECT_THAT(m3->skipped, Contains(::testing::Pair(HasSubstr("vision"), 27)));
  const auto glm = check(data("goldens") / "glm4_moe");
  ASSERT_TRUE(glm.ok());
  EXPECT_THAT(glm->skipped, Contains(::testing::Pair(HasSubstr("multi-token"), ::testing::Gt(0))));
  EXPECT_EQ(glm->used_tensors + glm->skipped[0].second, glm->source_tensors);
}

TEST(Accounting, EveryOutputTensorHasAnExplainLine) {
  TempDir tmp;
  const auto r = export_to(data("goldens") / "granitemoe", tmp / "out");
  ASSERT_TRUE(r.ok());
  for (const auto& d : ir::declared_tensors(open_mir(tmp / "out").graph))
    EXPECT_THAT(r->explain, HasSubstr("  " + d.name + " "));
  EXPECT_THAT(r->explain, HasSubstr("half 1"));
}

TEST(Accounting, AnotherModelIsRefusedQuickly) {
  Tiny tiny;
  tiny.layers = 1;
  TempDir tmp;
  Json c = tiny.config();
  c["num_hidden_layers"] = 5000;
  c["num_experts"] = 60000;
  write_checkpoint(tmp.path(), c, tiny.tensors());
  EXPECT_THAT(refusal(check(tmp.path())), HasSubstr("missing"));
}

TEST(Tied, UntiedWithoutHeadNeedsConsent) {
  const Tiny tiny;
  TensorMap t = tiny.tensors();
  t.erase("lm_head.weight");
  TempDir tmp;
  write_checkpoint(tmp / "m", tiny.config(), t);
  EXPECT_THAT(refusal(check(tmp / "m")),
              AllOf(HasSubstr("lm_head.weight"), HasSubstr("--tie"), HasSubstr("tie_word_embeddings")));
  const auto r = export_to(tmp / "m", tmp / "out", [](ExportOptions& o) { o.tie = true; });
  ASSERT_TRUE(r.ok()) << r.error().message();
  const ir::MirDir m = open_mir(tmp / "out");
  EXPECT_FALSE(m.has("lm_head.weight"));
  EXPECT_EQ(m.graph.epilogue.weights.back().name, "embed.weight");
}

TEST(Tied, EqualHeadIsStoredOnceAndAnotherHeadIsUsed) {
  Tiny tiny;
  Json c = tiny.config();
  c["tie_word_embeddings"] = true;
  TensorMap t = tiny.tensors();
  t["lm_head.weight"] = t["model.embed_tokens.weight"];
  TempDir tmp;
  write_checkpoint(tmp / "m", c, t);
  auto equal = export_to(tmp / "m", tmp / "equal");
  ASSERT_TRUE(equal.ok()) << equal.error().message();
  EXPECT_FALSE(open_mir(tmp / "equal").has("lm_head.weight"));

  reinterpret_cast<BF16*>(t["lm_head.weight"].data.data())[17] = to_bf16(0.5f);
  write_checkpoint(tmp / "m", c, t);
  auto other = export_to(tmp / "m", tmp / "other");
  ASSERT_TRUE(other.ok()) << other.error().message();
  EXPECT_THAT(other->notes, Contains(AllOf(HasSubstr("warning"), HasSubstr("lm_head.weight"))));
  const ir::MirDir m = open_mir(tmp / "other");
  EXPECT_EQ(to_f32_vector(m.weight("lm_head.weight"))[17], 0.5f);
}

TEST(Tied, WhenTheConfigIsSilentTheFilesDecide) {
  const Tiny tiny;
  Json c = tiny.config();
  c.erase("tie_word_embeddings");
  TensorMap t = tiny.tensors();
  TempDir tmp;
  write_checkpoint(tmp / "m", c, t);
  ASSERT_TRUE(export_to(tmp / "m", tmp / "head").ok());
  EXPECT_TRUE(open_mir(tmp / "head").has("lm_head.weight"));
  t.erase("lm_head.weight");
  write_checkpoint(tmp / "m", c, t);
  ASSERT_TRUE(export_to(tmp / "m", tmp / "none").ok());
  EXPECT_FALSE(open_mir(tmp / "none").has("lm_head.weight"));
}

TEST(Values, NanAndInfinityAreNamedWithTheirPlace) {
  Tiny tiny;
  tiny.layers = 2;
  TempDir tmp;
  TensorMap t = tiny.tensors();
  const std::string nan = "model.layers.1.mlp.experts.2.up_proj.weight";
  reinterpret_cast<BF16*>(t[nan].data.data())[5 * tiny.hidden + 7] = to_bf16(NAN);
  write_checkpoint(tmp / "m", tiny.config(), t);
  EXPECT_THAT(refusal(export_to(tmp / "m", tmp / "out")),
              AllOf(HasSubstr("model.safetensors"), HasSubstr(nan), HasSubstr("NaN"), HasSubstr("layers.1."),
                    HasSubstr("expert 2"), HasSubstr("row 5, column 7")));
  EXPECT_FALSE(fs::exists(tmp / "out"));

  t = tiny.tensors();
  reinterpret_cast<BF16*>(t["model.layers.0.input_layernorm.weight"].data.data())[3] = to_bf16(-INFINITY);
  write_checkpoint(tmp / "m", tiny.config(), t);
  EXPECT_THAT(refusal(export_to(tmp / "m", tmp / "out")),
              AllOf(HasSubstr("model.layers.0.input_layernorm.weight"), HasSubstr("infinity"), HasSubstr("column 3")));
}

TEST(Values, SubnormalRowsAreReported) {
  const Tiny tiny;
  TensorMap t = tiny.tensors();
  auto* w = reinterpret_cast<uint16_t*>(t["model.layers.0.self_attn.q_proj.weight"].data.data());
  for (int i = 0; i < 32; ++i) w[3 * 32 + i] = 0x0001;
  for (int i = 0; i < 32; ++i) w[4 * 32 + i] = 0;  // a row of zeros is nothing to report
  TempDir tmp;
  write_checkpoint(tmp / "m", tiny.config(), t);
  const auto r = export_to(tmp / "m", tmp / "out");
  ASSERT_TRUE(r.ok());
  EXPECT_THAT(r->notes,
              Contains(AllOf(HasSubstr("self_attn.q_proj.weight"), HasSubstr("1 rows"), HasSubstr("subnormal"))));
}

TEST(Values, MixedPrecisionInOneStackIsRefused) {
  const Tiny tiny;
  TensorMap t = tiny.tensors();
  Tensor& w = t["model.layers.0.mlp.experts.3.up_proj.weight"];
  w = tensor_f32(w.shape, to_f32_vector(w.view()));
  TempDir tmp;
  write_checkpoint(tmp.path(), tiny.config(), t);
  EXPECT_THAT(refusal(check(tmp.path())), AllOf(HasSubstr("experts.3.up_proj.weight is F32"), HasSubstr("BF16")));
}

TEST(Values, RouterOfAnotherPrecisionMakesItsOwnBlock) {
  Tiny tiny;
  tiny.layers = 2;
  TensorMap t = tiny.tensors();
  Tensor& w = t["model.layers.1.mlp.gate.weight"];
  w = tensor_f32(w.shape, to_f32_vector(w.view()));
  TempDir tmp;
  write_checkpoint(tmp / "m", tiny.config(), t);
  ASSERT_TRUE(export_to(tmp / "m", tmp / "out").ok());
  const ir::MirDir m = open_mir(tmp / "out");
  ASSERT_EQ(m.graph.blocks.size(), 2u);
  EXPECT_EQ(m.graph.blocks[1].name, "moe_2");
}

TEST(Glob, Stars) {
  EXPECT_TRUE(glob_match("vision_tower.*", "vision_tower.a.b"));
  EXPECT_TRUE(glob_match("*inv_freq", "model.rotary_emb.inv_freq"));
  EXPECT_TRUE(glob_match("a*b*c", "a--b--b-c"));
  EXPECT_FALSE(glob_match("a*b*c", "a--b--b-"));
  EXPECT_FALSE(glob_match("vision", "vision_tower"));
}

}  // namespace
}  // namespace mi::model
