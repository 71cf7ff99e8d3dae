// A GGUF file as a checkpoint: its keys as a config, refusals by name, the tokenizer.

#include "model/gguf_import.h"

#include <gmock/gmock.h>

#include "model/gguf_writer.h"
#include "model/testing.h"

namespace mi::model {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

// The keys of a small qwen3moe.
GgufHeader header() {
  GgufHeader h;
  h.version = 3;
  h.keys = {{"general.architecture", "qwen3moe"},
            {"qwen3moe.block_count", 2u},
            {"qwen3moe.context_length", 512u},
            {"qwen3moe.embedding_length", 64u},
            {"qwen3moe.feed_forward_length", 128u},
            {"qwen3moe.expert_feed_forward_length", 32u},
            {"qwen3moe.expert_count", 8u},
            {"qwen3moe.expert_used_count", 2u},
            {"qwen3moe.attention.head_count", 4u},
            {"qwen3moe.attention.head_count_kv", 2u},
            {"qwen3moe.attention.key_length", 16u},
            {"qwen3moe.attention.layer_norm_rms_epsilon", 1e-6f},
            {"qwen3moe.rope.freq_base", 10000.0f},
            {"tokenizer.ggml.model", "gpt2"},
            {"tokenizer.ggml.pre", "qwen2"},
            {"tokenizer.ggml.tokens", Json::array({"<|end|>", "a", "b", "ab", "[PAD4]"})},
            {"tokenizer.ggml.token_type", Json::array({3, 1, 1, 4, 5})},
            {"tokenizer.ggml.merges", Json::array({"a b"})},
            {"tokenizer.ggml.eos_token_id", 0u},
            {"tokenizer.chat_template", "{{ x }}"}};
  h.tensors = {{"token_embd.weight", 0, {5, 64}, 0, 0}, {"blk.0.ffn_gate_exps.weight", 12, {8, 32, 64}, 0, 0}};
  return h;
}

TEST(GgufImport, KeysBecomeTheFamilysConfig) {
  const auto m = read_gguf_model(header(), "x.gguf");
  ASSERT_TRUE(m.ok()) << m.error().message();
  const Json& c = m->config;
  EXPECT_EQ(c["model_type"], "qwen3_moe");
  EXPECT_EQ(c["num_hidden_layers"], 2);
  EXPECT_EQ(c["hidden_size"], 64);
  EXPECT_EQ(c["moe_intermediate_size"], 32);
  EXPECT_EQ(c["num_experts"], 8);
  EXPECT_EQ(c["num_experts_per_tok"], 2);
  EXPECT_EQ(c["vocab_size"], 5);
  EXPECT_EQ(c["norm_topk_prob"], true);  // built into llama.cpp's qwen3moe
  EXPECT_EQ(c["tie_word_embeddings"], true);
  EXPECT_EQ(c["eos_token_id"], Json::array({0}));
  EXPECT_EQ(m->recipe.layer.at("moe.experts.gate.weight")[0].from[0], "blk.{layer}.ffn_gate_exps.weight");
  EXPECT_EQ(m->recipe.layer.at("moe.experts.gate.weight")[0].known_as,
            "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight");
  auto config = Config::create(c, "x.gguf", m->recipe.keys, m->recipe.text_config);
  ASSERT_TRUE(config.ok());
  const auto arch = resolve_arch(m->recipe, *config);
  ASSERT_TRUE(arch.ok()) << arch.error().message();
  EXPECT_EQ(arch->attention.head_dim, 16);
  EXPECT_EQ(arch->eps, 1e-6f);
}

TEST(GgufImport, TheRouterHasToBeTheFamilys) {
  GgufHeader h = header();
  const auto follow = [&](Json gating) {
    h.keys["qwen3moe.expert_gating_func"] = std::move(gating);
    const auto m = read_gguf_model(h, "x.gguf");
    auto config = Config::create(m->config, "x.gguf", m->recipe.keys, m->recipe.text_config);
    auto arch = resolve_arch(m->recipe, *config);
    return follow_gguf(*m, &*arch);
  };
  EXPECT_TRUE(follow(1u).ok());
  const Status s = follow(2u);
  ASSERT_FALSE(s.ok());
  EXPECT_THAT(s.error().message(), AllOf(HasSubstr("expert_gating_func is 2"), HasSubstr("softmax")));
}

TEST(GgufImport, KeysWithoutEffectAreNamed) {
  GgufHeader h = header();
  EXPECT_TRUE(read_gguf_model(h, "x.gguf")->notes.empty());
  h.keys["qwen3moe.attention.temperature"] = 2.0f;
  EXPECT_THAT(read_gguf_model(h, "dir/x.gguf")->notes,
              ::testing::ElementsAre("x.gguf: qwen3moe.attention.temperature has no effect"));
}

TEST(GgufImport, LlamaIsTwoFamilies) {
  GgufHeader h;
  h.keys = {{"general.architecture", "llama"}, {"llama.block_count", 1u}};
  EXPECT_EQ(read_gguf_model(h, "x.gguf")->recipe.family, "llama");
  h.keys["llama.expert_count"] = 0u;
  EXPECT_EQ(read_gguf_model(h, "x.gguf")->recipe.family, "llama");
  h.keys["llama.expert_count"] = 8u;
  EXPECT_EQ(read_gguf_model(h, "x.gguf")->recipe.family, "mixtral");
}

TEST(GgufImport, RefusalsSayWhat) {
  const auto refused = [](const std::function<void(GgufHeader&)>& change) {
    GgufHeader h = header();
    change(h);
    return refusal(read_gguf_model(h, "x.gguf"));
  };
  EXPECT_THAT(refused([](GgufHeader& h) { h.keys["general.architecture"] = "deepseek9"; }),
              AllOf(HasSubstr("'deepseek9'"), HasSubstr("qwen3moe")));
  EXPECT_THAT(refused([](GgufHeader& h) { h.keys.erase("general.architecture"); }), HasSubstr("general.architecture"));
  EXPECT_THAT(refused([](GgufHeader& h) { h.keys["split.count"] = 3u; }), HasSubstr("3 parts"));
  EXPECT_THAT(refused([](GgufHeader& h) { h.tensors[1].type = 16; }),
              AllOf(HasSubstr("blk.0.ffn_gate_exps.weight"), HasSubstr("IQ2_XXS"), HasSubstr("Q4_K")));
  EXPECT_THAT(refused([](GgufHeader& h) {
                h.keys["qwen3moe.attention.head_count_kv"] = Json::array({2, 4});
              }),
              HasSubstr("head_count_kv differs between layers"));
  EXPECT_THAT(refused([](GgufHeader& h) { h.keys["qwen3moe.rope.scaling.type"] = "yarn"; }), HasSubstr("yarn"));
  EXPECT_THAT(refused([](GgufHeader& h) { h.keys["qwen3moe.block_count"] = "many"; }), HasSubstr("block_count"));
  EXPECT_THAT(refused([](GgufHeader& h) { h.keys["qwen3moe.nextn_predict_layers"] = 2u; }), HasSubstr("block_count"));
}

TEST(GgufImport, Tokenizer) {
  const TokenizerFiles t = gguf_tokenizer(header());
  ASSERT_TRUE(t.has_tokenizer);
  EXPECT_EQ(t.chat_template, "{{ x }}");
  ASSERT_EQ(t.texts.size(), 2u);
  const auto j = parse_json(t.texts[0].second, "t");
  ASSERT_TRUE(j.ok());
  EXPECT_EQ((*j)["model"]["vocab"], (Json{{"<|end|>", 0}, {"a", 1}, {"b", 2}, {"ab", 3}}));
  EXPECT_EQ((*j)["model"]["merges"], Json::array({"a b"}));
  ASSERT_EQ((*j)["added_tokens"].size(), 2u);
  EXPECT_EQ((*j)["added_tokens"][0]["special"], true);
  EXPECT_EQ((*j)["added_tokens"][1]["special"], false);
  EXPECT_EQ((*j)["normalizer"]["type"], "NFC");
  EXPECT_EQ(pre_tokenizer_name((*j)["pre_tokenizer"], false), "qwen2");
  EXPECT_TRUE((*j)["post_processor"].is_null());
  EXPECT_EQ(parse_json(t.texts[1].second, "t")->at("eos_token"), "<|end|>");
}

TEST(GgufImport, BosIsPutWhereTheFileSaysSo) {
  GgufHeader h = header();
  h.keys["tokenizer.ggml.add_bos_token"] = true;
  h.keys["tokenizer.ggml.bos_token_id"] = 0u;
  const auto j = parse_json(gguf_tokenizer(h).texts[0].second, "t");
  EXPECT_EQ((*j)["post_processor"]["single"][0]["SpecialToken"]["id"], "<|end|>");
}

TEST(GgufImport, ATokenizerThatCannotBeRebuiltIsLeftOut) {
  const auto note = [](const std::string& key, Json v) {
    GgufHeader h = header();
    h.keys[key] = std::move(v);
    const TokenizerFiles t = gguf_tokenizer(h);
    EXPECT_FALSE(t.has_tokenizer);
    return t.notes.empty() ? "" : t.notes[0];
  };
  EXPECT_THAT(note("tokenizer.ggml.model", "llama"), HasSubstr("\"llama\""));
  EXPECT_THAT(note("tokenizer.ggml.pre", "bloom"), HasSubstr("\"bloom\""));
  EXPECT_THAT(note("tokenizer.ggml.tokens", Json::array({"a", "a", "b", "c", "d"})), HasSubstr("same text"));
  EXPECT_THAT(note("tokenizer.ggml.tokens", Json::array({1})), HasSubstr("tokens or merges"));
  EXPECT_THAT(note("tokenizer.ggml.token_type", Json::array({1})), HasSubstr("number"));
}

TEST(GgufImport, NamesOfPreTokenizersGoBothWays) {
  for (const char* name : {"gpt-2", "starcoder", "qwen2", "dbrx", "llama-bpe", "gpt-4o"}) {
    const auto p = pre_tokenizer_of(name);
    ASSERT_TRUE(p) << name;
    EXPECT_EQ(pre_tokenizer_name(p->pre_tokenizer, p->ignore_merges), name);
  }
  EXPECT_FALSE(pre_tokenizer_of("unknown"));
}

TEST(GgufImport, EveryWeightOfAFamilyHasItsName) {
  for (const GgufArch& a : gguf_archs()) {
    const auto r = find_recipe(a.family, "test");
    ASSERT_TRUE(r.ok()) << a.family;
    std::set<std::string> names;
    for (const auto& [local, from] : r->layer) {
      const std::string n = gguf_tensor_name(a, local);
      EXPECT_TRUE(n.empty() || names.insert(n).second) << n;
    }
    for (const char* needed : {"attn_q.weight", "attn_output.weight"}) EXPECT_EQ(names.count(needed), 1u) << a.family;
    EXPECT_EQ(names.count(a.moe ? "ffn_down_exps.weight" : "ffn_down.weight"), 1u) << a.family;
  }
}

TEST(GgufImport, FilesAndFolders) {
  TempDir tmp;
  const Path file = data("gguf") / "q8_0.gguf";
  fs::create_directories(tmp / "m");
  fs::copy_file(file, tmp / "m" / "a.gguf");
  const auto r = export_to(tmp / "m", tmp / "out");
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_EQ(r->info.name, "a");
  EXPECT_EQ(r->source_tensors, r->used_tensors);
  const ir::MirDir m = open_mir(tmp / "out");
  EXPECT_EQ(m.provenance["quantized"], "gguf");
  EXPECT_EQ(load_json(tmp / "out" / ir::kSourceConfig)["model_type"], "qwen3_moe");
  EXPECT_TRUE(m.provenance["source"]["files"].contains("a.gguf"));
  fs::copy_file(file, tmp / "m" / "b.gguf");
  EXPECT_THAT(refusal(check(tmp / "m")), AllOf(HasSubstr("2 GGUF files"), HasSubstr("a.gguf, b.gguf")));
  EXPECT_TRUE(check(tmp / "m" / "b.gguf").ok());
  EXPECT_THAT(refusal(check(tmp / "m" / "b.gguf", [](ExportOptions& o) { o.model_type = "mixtral"; })),
              HasSubstr("qwen3_moe"));
  EXPECT_THAT(refusal(check(tmp / "m" / "b.gguf", [](ExportOptions& o) { o.dummy_weights = true; })),
              HasSubstr("--dummy-weights"));
}

}  // namespace
}  // namespace mi::model
