#include "base/temp_dir.h"
#include "model/gguf.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "model/export.h"
#include "model/gguf_arch.h"
#include "tools/convert.h"
#include "tools/gguf/arch.h"
#include "tools/gguf/layer.h"

namespace mi::tools {
namespace {

namespace fs = std::filesystem;
using gguf::fit_rope;
using model::pre_tokenizer_name;

Path golden(const std::string& name) { return Path(MI_SOURCE_DIR) / "tests" / "data" / "goldens" / name; }

ir::MirDir exported_for_gguf(const std::string& name, const Path& out) {
  model::ExportOptions o;
  o.model_dir = golden(name);
  o.output = out;
  const auto r = model::export_model(o);
  EXPECT_TRUE(r.ok()) << r.error().message();
  auto m = ir::MirDir::open(out);
  EXPECT_TRUE(m.ok());
  return std::move(m).value();
}

std::vector<float> frequencies(double base, double factor, size_t n) {
  std::vector<float> f;
  for (size_t i = 0; i < n; ++i) f.push_back(float(1 / std::pow(base, double(i) / double(n)) / factor));
  return f;
}

TEST(Rope, TheBaseIsFoundAgain) {
  double base = 0, factor = 0;
  for (double b : {1e4, 1e6, 5e6, 1.5e5, 500000.0, 8000000.0, 10007.0, 1e7 / 3})
    for (double f : {1.0, 4.0, 2.5})
      for (size_t n : {4, 32, 64}) {
        ASSERT_TRUE(fit_rope(frequencies(b, f, n), &base, &factor)) << b << " " << f << " " << n;
        EXPECT_NEAR(base / b, 1, 2e-6);
        EXPECT_NEAR(factor / f, 1, 1e-6);  // the inverse of a float
      }
  ASSERT_TRUE(fit_rope(frequencies(1e6, 1, 64), &base, &factor));
  EXPECT_EQ(base, 1e6);
}

TEST(Rope, BentFrequenciesHaveNoBase) {
  double base = 0, factor = 0;
  std::vector<float> f = frequencies(5e5, 1, 32);
  for (size_t i = 20; i < 32; ++i) f[i] /= 8;
  EXPECT_FALSE(fit_rope(f, &base, &factor));
  f = frequencies(1e4, 1, 32);
  f[7] *= 1.0001f;
  EXPECT_FALSE(fit_rope(f, &base, &factor));
}

TEST(PreTokenizer, KnownRulesHaveNames) {
  const auto parse = [](const std::string& text) { return Json::parse(text); };
  const Json gpt2 =
      parse(R"({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true})");
  EXPECT_EQ(pre_tokenizer_name(gpt2, false), "gpt-2");
  EXPECT_EQ(pre_tokenizer_name(gpt2, true), "");
  const auto split = [&](const std::string& regex, const std::string& behavior = "Isolated") {
    Json j = parse(R"({"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {}, "invert": false},
                       {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]})");
    j["pretokenizers"][0]["pattern"]["Regex"] = regex;
    j["pretokenizers"][0]["behavior"] = behavior;
    return j;
  };
  const std::string head = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|";
  const std::string tail = "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
  EXPECT_EQ(pre_tokenizer_name(split(head + "\\p{N}" + tail), false), "qwen2");
  EXPECT_EQ(pre_tokenizer_name(split(head + "\\p{N}{1,3}" + tail), true), "llama-bpe");
  EXPECT_EQ(pre_tokenizer_name(split(head + "\\p{N}{1,3}" + tail), false), "dbrx");
  EXPECT_EQ(pre_tokenizer_name(split(head + "\\p{N}{1,2}" + tail), false), "");
  EXPECT_EQ(pre_tokenizer_name(split(head + "\\p{N}" + tail, "Removed"), false), "");
  EXPECT_EQ(pre_tokenizer_name(parse(R"({"type": "WhitespaceSplit"})"), false), "");
  EXPECT_EQ(pre_tokenizer_name(Json(), false), "");
}

// Every family's graph is understood to the last node, the ones that GGUF has no place for too.
TEST(Layer, EveryFixtureIsRead) {
  TempDir dir;
  int64_t n = 0;
  for (const auto& e : fs::directory_iterator(golden(""))) {
    const std::string name = e.path().filename().string();
    const ir::MirDir m = exported_for_gguf(name, dir / name);
    for (const ir::Block& b : m.graph.blocks) {
      const auto l = gguf::read_layer(b);
      ASSERT_TRUE(l.ok()) << name << ": " << l.error().message();
      EXPECT_EQ(l->moe, b.name.starts_with("moe")) << name;
      EXPECT_EQ(l->index.dim != 0, b.name.ends_with(".sparse")) << name;
      EXPECT_TRUE(l->q.weight && l->k.weight && l->v.weight && l->o.weight && l->attn_norm && l->mlp_norm && l->mlp);
      ++n;
    }
    const auto ends = gguf::read_ends(m.graph);
    ASSERT_TRUE(ends.ok()) << name << ": " << ends.error().message();
  }
  EXPECT_GE(n, 15);
}

TEST(Layer, WhatIsNotUnderstoodIsNamed) {
  TempDir dir;
  const ir::MirDir m = exported_for_gguf("qwen3_moe", dir / "mir");
  ir::Block b = m.graph.blocks[0];
  for (ir::Node& n : b.nodes)
    if (n.op == Op::kRmsNorm) std::get<NormParams>(n.params).eps *= 2;
  EXPECT_TRUE(gguf::read_layer(b).ok());  // all of them alike
  for (ir::Node& n : b.nodes)
    if (n.op == Op::kRmsNorm) {
      std::get<NormParams>(n.params).eps *= 2;
      break;
    }
  const auto uneven = gguf::read_layer(b);
  ASSERT_FALSE(uneven.ok());
  EXPECT_NE(uneven.error().message().find("eps"), std::string::npos) << uneven.error().message();

  b = m.graph.blocks[0];
  ir::BlockBuilder builder(&b);
  builder.node(Op::kScale, {b.inputs[0]}, {}, ScaleParams{2}, "spare");
  const auto spare = gguf::read_layer(b);
  ASSERT_FALSE(spare.ok());
  EXPECT_NE(spare.error().message().find("scale has no place"), std::string::npos) << spare.error().message();
}

// The same weights in another graph would answer differently: each property is looked at.
TEST(Arch, DifferingGraphsAreRefused) {
  TempDir dir;
  int number = 0;
  const auto refusal = [&](const std::string& fixture, const auto& change) {
    ir::MirDir m = exported_for_gguf(fixture, dir / (fixture + std::to_string(number++)));
    change(m.graph);
    const auto plan = gguf::plan_file(m);
    return plan.ok() ? std::string() : plan.error().message();
  };
  const auto each = [](ir::Graph& g, Op op, const auto& f) {
    for (ir::Block& b : g.blocks)
      for (ir::Node& n : b.nodes)
        if (n.op == op) f(n);
  };
  EXPECT_EQ(refusal("qwen3_moe", [](ir::Graph&) {}), "");
  const auto message = [&](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  message(refusal("qwen3_moe",
                  [&](ir::Graph& g) {
                    each(g, Op::kRoute, [](ir::Node& n) { std::get<RouteParams>(n.params).renorm = false; });
                  }),
          "not divided by their sum");
  message(refusal("qwen3_moe",
                  [&](ir::Graph& g) {
                    each(g, Op::kRoute, [](ir::Node& n) { std::get<RouteParams>(n.params).scale = 2; });
                  }),
          "multiplied by 2");
  message(refusal("qwen3_moe",
                  [&](ir::Graph& g) {
                    each(g, Op::kAttention, [](ir::Node& n) { std::get<AttentionParams>(n.params).window = 8; });
                  }),
          "sliding window of 8");
  message(refusal("qwen3_moe",
                  [&](ir::Graph& g) {
                    each(g, Op::kAttention, [](ir::Node& n) { std::get<AttentionParams>(n.params).scale = 1; });
                  }),
          "scaled by 1");
  message(refusal("qwen3_moe",
                  [&](ir::Graph& g) {
                    each(g, Op::kActivation,
                         [](ir::Node& n) { std::get<ActivationParams>(n.params).kind = ActKind::kGelu; });
                  }),
          "silu");
  message(refusal("qwen3_moe",
                  [&](ir::Graph& g) {
                    each(g, Op::kRope, [](ir::Node& n) { std::get<RopeParams>(n.params).interleaved = true; });
                  }),
          "neighbouring pairs");
  message(refusal("qwen2_moe",
                  [&](ir::Graph& g) {
                    each(g, Op::kRoute, [](ir::Node& n) { std::get<RouteParams>(n.params).renorm = true; });
                  }),
          "divided by their sum");
  message(refusal("llama", [&](ir::Graph& g) { g.info.family = "other"; }), "qwen3_moe");
  message(refusal("gpt_oss", [](ir::Graph&) {}), "those that can are");
}

TEST(Arch, NoFileIsLeftByARefusal) {
  TempDir dir;
  exported_for_gguf("gpt_oss", dir / "mir");
  hw::ThreadPool pool(2);
  ConvertOptions o;
  o.model = dir / "mir";
  o.output = dir / "x.gguf";
  EXPECT_FALSE(convert_to_gguf(o, pool).ok());
  EXPECT_FALSE(fs::exists(dir / "x.gguf"));
}

TEST(Convert, EveryTypeIsAcceptedByTheReader) {
  TempDir dir;
  exported_for_gguf("minimax_m2", dir / "mir");
  hw::ThreadPool pool(2);
  for (model::GgufType t :
       {model::GgufType::kF32, model::GgufType::kF16, model::GgufType::kQ8_0, model::GgufType::kQ4_0,
        model::GgufType::kBF16}) {
    ConvertOptions o;
    o.model = dir / "mir";
    o.output = dir / std::string(model::gguf_type_name(t));
    o.type = t;
    const auto r = convert_to_gguf(o, pool);
    ASSERT_TRUE(r.ok()) << r.error().message();
    const auto s = model::read_gguf(o.output);
    ASSERT_TRUE(s.ok()) << s.error().message();
    EXPECT_EQ(s->architecture(), "minimax-m2");
    EXPECT_EQ(int64_t(s->tensors.size()), r->tensors);
    EXPECT_EQ(fs::file_size(o.output), r->bytes);
  }
}

}  // namespace
}  // namespace mi::tools
