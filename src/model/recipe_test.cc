// Families as data: model types, recipes from a file, what a recipe may say.

#include "model/recipe.h"

#include <gmock/gmock.h>

#include "model/testing.h"

namespace mi::model {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

TEST(Families, AreKnown) {
  EXPECT_THAT(known_families(), ::testing::UnorderedElementsAre(
                                    "minimax_m3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "dots1", "glm4_moe",
                                    "minimax_m2", "granitemoe", "ernie4_5_moe", "gpt_oss", "llama", "qwen3"));
}

TEST(Families, HyphensAndTheSpellingInCirculation) {
  EXPECT_EQ(find_recipe("minimax-m3", "x")->family, "minimax_m3");
  EXPECT_EQ(find_recipe("MiniMax-M3-VL", "x")->family, "minimax_m3");
  const auto slip = find_recipe("minmax-m3", "x");
  ASSERT_TRUE(slip.ok());
  EXPECT_EQ(slip->family, "minimax_m3");
  EXPECT_THAT(slip->notes, Contains(HasSubstr("minmax-m3")));
  const auto r = check(data("goldens") / "minimax_m3", [](ExportOptions& o) { o.model_type = "minmax-m3"; });
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_THAT(r->notes, Contains(HasSubstr("minmax-m3")));
}

TEST(Families, UnknownTypeGetsTheListAndTheNearest) {
  EXPECT_THAT(refusal(find_recipe("qwen3_mo", "config.json")),
              AllOf(HasSubstr("config.json: model_type 'qwen3_mo'"), HasSubstr("did you mean 'qwen3_moe'"),
                    HasSubstr("gpt_oss")));
  EXPECT_THAT(refusal(find_recipe("deepseek_v3", "config.json")),
              AllOf(HasSubstr("deepseek_v3"), HasSubstr("mixtral")));
}

TEST(Families, TypeOfTheCommandLineAndOfTheConfigMustFit) {
  EXPECT_THAT(refusal(check(data("goldens") / "mixtral", [](ExportOptions& o) { o.model_type = "olmoe"; })),
              AllOf(HasSubstr("mixtral"), HasSubstr("olmoe")));
  Tiny tiny;
  TempDir tmp;
  Json c = tiny.config();
  c.erase("model_type");
  write_checkpoint(tmp.path(), c, tiny.tensors());
  EXPECT_THAT(refusal(check(tmp.path())), AllOf(HasSubstr("model_type is missing"), HasSubstr("--model-type")));
  const auto r = check(tmp.path(), [](ExportOptions& o) { o.model_type = "qwen3-moe"; });
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_EQ(r->info.model_type, "qwen3-moe");
}

// A model that no built-in family describes: q and k normed per head, sigmoid router with selection bias under other
// names, a shared MLP, one dense layer, renormalised with an epsilon and scaled, an extra layer to be skipped, tied.
constexpr const char* kNewFamily = R"(
family: hy_like
model_types: [hy_like]
config:
  eps: {default: 1.0e-5}
  first_dense: {default: 1}
  mtp_layers: {default: 1}
attention: {qk_norm: per_head}
rope: {theta: 11158840.0}
moe:
  layers: [{from: first_dense}]
  score: sigmoid
  select_bias: true
  renorm: true
  renorm_eps: 1.0e-20
  scale: $route_scale
  shared_width: $(shared_experts * expert_width)
extra_layers: $mtp_layers
tensors:
  include: [norms, attention, mlp, router, experts, shared_experts]
  layer:
    moe.router.weight: mlp.router.gate.weight
    moe.select_bias: mlp.expert_bias
    attn.q.weight: {from: self_attn.qkv_proj.weight, ops: [{rows: [0, heads * head_dim]}]}
    attn.k.weight: {from: self_attn.qkv_proj.weight, ops: [{rows: [heads * head_dim, kv_heads * head_dim]}]}
    attn.v.weight: {from: self_attn.qkv_proj.weight, ops: [{rows: [(heads + kv_heads) * head_dim, kv_heads * head_dim]}]}
    attn.o.weight: self_attn.dense.weight
    moe.shared.down.weight: {from: [mlp.shared_mlp.down_a, mlp.shared_mlp.down_b]}
)";

TEST(FamilyFile, ANewFamilyOfKnownBlocksNeedsNoCode) {
  TempDir tmp;
  write_text(tmp / "hy.yaml", kNewFamily);
  Tiny tiny;
  tiny.layers = 2;
  Json c = tiny.config();
  c["model_type"] = "hy-like";
  c["routed_scaling_factor"] = 2.5;
  c["num_shared_experts"] = 2;
  c["tie_word_embeddings"] = true;
  TensorMap t = tiny.tensors();
  t.erase("lm_head.weight");
  std::vector<float> q = to_f32_vector(t["model.layers.1.self_attn.q_proj.weight"].view());
  for (int l = 0; l < 2; ++l) {
    const std::string p = fmt::format("model.layers.{}.", l);
    Tensor qkv = t[p + "self_attn.q_proj.weight"];
    for (const char* n : {"self_attn.k_proj.weight", "self_attn.v_proj.weight"}) {
      qkv.data.insert(qkv.data.end(), t[p + n].data.begin(), t[p + n].data.end());
      t.erase(p + n);
    }
    qkv.shape[0] = 64;
    t[p + "self_attn.qkv_proj.weight"] = qkv;
    t.erase(p + "self_attn.q_proj.weight");
    t[p + "self_attn.dense.weight"] = t[p + "self_attn.o_proj.weight"];
    t.erase(p + "self_attn.o_proj.weight");
  }
  std::erase_if(t, [](const auto& e) { return e.first.starts_with("model.layers.0.mlp."); });
  t["model.layers.0.mlp.gate_proj.weight"] = random_bf16({48, 32}, 1);
  t["model.layers.0.mlp.up_proj.weight"] = random_bf16({48, 32}, 2);
  t["model.layers.0.mlp.down_proj.weight"] = random_bf16({32, 48}, 3);
  const std::string p = "model.layers.1.mlp.";
  t[p + "router.gate.weight"] = t[p + "gate.weight"];
  t.erase(p + "gate.weight");
  t[p + "expert_bias"] = tensor_f32({4}, std::vector<float>{0.1f, 0.2f, 0.3f, 0.4f});
  t[p + "shared_mlp.gate_proj.weight"] = random_bf16({32, 32}, 4);
  t[p + "shared_mlp.up_proj.weight"] = random_bf16({32, 32}, 5);
  t[p + "shared_mlp.down_a"] = random_bf16({20, 32}, 6);
  t[p + "shared_mlp.down_b"] = random_bf16({12, 32}, 7);
  t["model.layers.2.eh_proj.weight"] = random_bf16({4, 4}, 8);
  write_checkpoint(tmp / "m", c, t);

  EXPECT_THAT(refusal(check(tmp / "m")), HasSubstr("--family-file"));
  const auto r = export_to(tmp / "m", tmp / "out", [&](ExportOptions& o) { o.family_file = tmp / "hy.yaml"; });
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_EQ(r->family, "hy_like");
  EXPECT_THAT(r->skipped, Contains(::testing::Pair(HasSubstr("multi-token"), 1)));
  const ir::MirDir m = open_mir(tmp / "out");
  EXPECT_EQ(to_f32_vector(m.weight("layers.1.attn.q.weight")), q);
  const auto down = to_f32_vector(m.weight("layers.1.moe.shared.down.weight"));
  EXPECT_EQ(std::vector<float>(down.begin() + 20 * 32, down.end()), to_f32_vector(t[p + "shared_mlp.down_b"].view()));
  EXPECT_EQ(m.graph.blocks.size(), 2u);
  EXPECT_FALSE(m.has("lm_head.weight"));
  const auto& nodes = m.graph.block_of(1).nodes;
  const auto route = std::find_if(nodes.begin(), nodes.end(), [](const ir::Node& n) { return n.op == Op::kRoute; });
  EXPECT_EQ(std::get<RouteParams>(route->params).scale, 2.5f);
  EXPECT_EQ(std::get<RouteParams>(route->params).score, RouteScore::kSigmoid);
}

TEST(FamilyFile, IsForItsModelTypes) {
  TempDir tmp;
  write_text(tmp / "hy.yaml", kNewFamily);
  EXPECT_THAT(refusal(check(data("goldens") / "mixtral", [&](ExportOptions& o) { o.family_file = tmp / "hy.yaml"; })),
              AllOf(HasSubstr("mixtral"), HasSubstr("hy_like")));
}

TEST(Recipe, MistakesAreNamed) {
  const std::string head = "family: x\nmodel_types: [x]\n";
  EXPECT_THAT(refusal(parse_recipe(head + "atention: {}\n", "x.yaml")),
              AllOf(HasSubstr("x.yaml"), HasSubstr("'atention'"), HasSubstr("'attention'")));
  EXPECT_THAT(refusal(parse_recipe(head + "config: {k: {default: 1, typo: 2}}\n", "x.yaml")), HasSubstr("typo"));
  EXPECT_THAT(refusal(parse_recipe(head + "config: {new: {default: 1}}\n", "x.yaml")),
              AllOf(HasSubstr("new"), HasSubstr("keys")));
  EXPECT_THAT(refusal(parse_recipe(head + "tensors: {include: [atention]}\n", "x.yaml")),
              AllOf(HasSubstr("atention"), HasSubstr("experts")));
  EXPECT_THAT(refusal(parse_recipe("model_types: [x]\n", "x.yaml")), HasSubstr("family is missing"));
  EXPECT_THAT(refusal(parse_recipe("[1, 2", "x.yaml")), HasSubstr("x.yaml"));
  EXPECT_THAT(refusal(parse_recipe(head + head, "x.yaml")), HasSubstr("twice"));
}

// A recipe's mistakes that show when it meets a checkpoint.
std::string mistake(const std::string& extra) {
  TempDir tmp;
  write_text(tmp / "x.yaml",
             "family: x\nmodel_types: [qwen3_moe]\nmlp: {}\ntensors: {include: [norms, attention, router, experts]}\n" +
                 extra);
  Tiny tiny;
  write_checkpoint(tmp / "m", tiny.config(), tiny.tensors());
  return refusal(check(tmp / "m", [&](ExportOptions& o) { o.family_file = tmp / "x.yaml"; }));
}

TEST(Recipe, MistakesInBlocksAreNamed) {
  EXPECT_THAT(mistake("attention: {qk_nrom: per_head}\n"), AllOf(HasSubstr("qk_nrom"), HasSubstr("qk_norm")));
  EXPECT_THAT(mistake("attention: {qk_norm: both}\n"), HasSubstr("'both'"));
  EXPECT_THAT(mistake("attention: {kind: mla}\n"), AllOf(HasSubstr("mla"), HasSubstr("not supported yet")));
  EXPECT_THAT(mistake("attention: {heads: $haeds}\n"), AllOf(HasSubstr("haeds"), HasSubstr("heads")));
  EXPECT_THAT(mistake("attention: {qk_norm: per_head}\nmoe: {score: softmax, renorm: yes_please}\n"),
              HasSubstr("renorm"));
  EXPECT_THAT(mistake("attention: {qk_norm: per_head}\n"),
              HasSubstr("mlp.gate.weight"));  // dense, but nothing binds its tensors
}

}  // namespace
}  // namespace mi::model
