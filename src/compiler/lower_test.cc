#include "compiler/lower.h"

#include <gtest/gtest.h>

#include "artifact/layout.h"
#include "artifact/print.h"
#include "compiler/fallbacks.h"
#include "compiler/testing.h"
#include "ir/verify.h"

namespace mi::compiler {
namespace {

ir::Graph graph(const std::string& text) {
  auto g = ir::parse(text);
  MI_CHECK(g.ok(), "{}", g.error().message());
  const Status s = ir::verify(*g);
  MI_CHECK(s.ok(), "{}", s.error().message());
  return *g;
}

std::string replaced(std::string s, const std::string& from, const std::string& to) {
  const size_t at = s.find(from);
  MI_CHECK(at != std::string::npos, "{}", from);
  return s.replace(at, from.size(), to);
}

artifact::Manifest as_manifest(const Program& p) {
  artifact::Manifest m;
  m.buffers = p.buffers;
  m.program = p.instrs;
  for (const auto& w : p.weights) m.weights.push_back(w.tensor);
  return m;
}

TEST(Lower, OneLayerAsText) {
  const auto p = lower(graph(R"(mir 1
model "m" { family = "t" model_type = "t" vocab = 20 hidden = 8 layers = 2 max_positions = 16 }
prologue {
  weight embed : f32[20, 8] embedding
  x = embed weight=embed : f32[T, 8]
  output x
}
block a layers=0..1 {
  input x : f32[T, 8]
  weight a.weight : f32[6, 8] dense
  weight b.weight : f32[10, 8] dense
  weight c.weight : f32[8, 6] dense
  ab = linear x, weight=[a.weight, b.weight] : f32[T, 16]
  b = slice ab {start=6 len=10} : f32[T, 10]
  b2 = slice b {start=2 len=6} : f32[T, 6]
  y = linear b2, x, weight=c.weight : f32[T, 8]
  output y
}
epilogue {
  input x : f32[T, 8]
  weight head : f32[20, 8] head
  r = select_rows x : f32[L, 8]
  out = linear r, weight=head : f32[L, 20]
  output out
})"),
                       FloatPrecision::kKeep);
  ASSERT_TRUE(p.ok()) << p.error().message();
  EXPECT_EQ(artifact::program_text(as_manifest(*p)),
            "embed -> x  weight=embed  (layer output)\n"
            "layer 0: linear x -> layers.0.ab  weight=layers.0.a.weight+layers.0.b.weight\n"
            "layer 0: linear layers.0.ab[8:14], x -> layers.0.y  weight=layers.0.c.weight  (residual 1, layer output)\n"
            "layer 1: linear layers.0.y -> layers.1.ab  weight=layers.1.a.weight+layers.1.b.weight\n"
            "layer 1: linear layers.1.ab[8:14], layers.0.y -> layers.1.y  weight=layers.1.c.weight  (residual 1, layer "
            "output)\n"
            "select_rows layers.1.y -> r\n"
            "linear r -> out  weight=head\n");
  // Lifetimes: a slice keeps its source alive, the logits live to the end.
  const std::pair<int32_t, int32_t> lives[] = {{0, 2}, {1, 2}, {2, 4}, {3, 4}, {4, 5}, {5, 6}, {6, 6}};
  ASSERT_EQ(p->buffers.size(), std::size(lives));
  for (size_t i = 0; i < std::size(lives); ++i)
    EXPECT_EQ(std::pair(p->buffers[i].first_instr, p->buffers[i].last_instr), lives[i]) << p->buffers[i].name;
  const auto& ab = p->weights[1].tensor;
  EXPECT_EQ(ab.n, 16);
  EXPECT_EQ(ab.k_pad, 64);
  EXPECT_EQ(p->weights[1].sources, (std::vector<std::string>{"layers.0.a.weight", "layers.0.b.weight"}));
}

TEST(Lower, PackingFollowsFormatPrecisionAndMark) {
  auto packing = [](const std::string& matrices, FloatPrecision precision, const std::string& name) {
    const auto p = lower(graph(testing::tiny_mir(matrices)), precision);
    MI_CHECK(p.ok(), "{}", p.error().message());
    for (const auto& w : p->weights)
      if (w.tensor.name == name) return w.tensor;
    MI_CHECK(false, "{}", name);
  };
  using artifact::Packing;
  const std::string o = "layers.0.attn.o.weight", router = "layers.1.moe.router.weight", norm = "norm.weight",
                    embed = "embed.weight";
  EXPECT_EQ(packing("w8a8", FloatPrecision::kKeep, o).packing, Packing::kPackedI8);
  EXPECT_EQ(packing("w8a8", FloatPrecision::kFp32, o).packing, Packing::kPackedI8);
  EXPECT_EQ(packing("w4a8_g64", FloatPrecision::kFp32, o).packing, Packing::kPackedI4);
  EXPECT_EQ(packing("w4a8_g64", FloatPrecision::kKeep, o).group, 64);
  EXPECT_EQ(packing("bf16", FloatPrecision::kKeep, o).packing, Packing::kPackedBF16);
  EXPECT_EQ(packing("bf16", FloatPrecision::kFp32, o).packing, Packing::kPackedF32);
  EXPECT_EQ(packing("f32", FloatPrecision::kKeep, o).packing, Packing::kPackedF32);
  EXPECT_EQ(packing("f32", FloatPrecision::kBf16, o).packing, Packing::kPackedBF16);
  EXPECT_EQ(packing("f16", FloatPrecision::kKeep, o).packing, Packing::kPackedF32);
  for (const auto p : {FloatPrecision::kKeep, FloatPrecision::kFp32, FloatPrecision::kBf16}) {
    EXPECT_EQ(packing("bf16", p, router).packing, Packing::kPackedF32);
    EXPECT_EQ(packing("bf16", p, norm).dtype, DType::kF32);
    EXPECT_EQ(packing("bf16", p, norm).packing, Packing::kPlain);
  }
  EXPECT_EQ(packing("bf16", FloatPrecision::kFp32, embed).dtype,
            DType::kBF16);  // widening it would cost memory and change nothing
  EXPECT_EQ(packing("f16", FloatPrecision::kKeep, embed).dtype, DType::kF32);
  EXPECT_EQ(packing("bf16", FloatPrecision::kKeep, "layers.2.moe.experts.down.weight").experts, 6);
}

TEST(Lower, PairRowsCachesAndSharedVectors) {
  const auto p = lower(graph(testing::tiny_mir("w8a8")), FloatPrecision::kKeep);
  ASSERT_TRUE(p.ok()) << p.error().message();
  EXPECT_EQ(p->max_k, 2);
  ASSERT_EQ(p->caches.size(), size_t(3));
  for (const auto& c : p->caches)
    EXPECT_EQ(std::tuple(c.kv_heads, c.k_dim, c.v_dim, c.index_dim, c.window), std::tuple(2, 8, 8, 0, 0));
  for (const auto& b : p->buffers) EXPECT_EQ(b.rows_per_token, b.type.rows == Rows::kPair ? 2 : 1) << b.name;
  int inv_freq = 0;  // read by two ropes of a layer, stored once
  for (const auto& w : p->weights) inv_freq += w.tensor.name == "layers.0.attn.inv_freq";
  EXPECT_EQ(inv_freq, 1);
  for (const auto& i : p->instrs) EXPECT_NE(i.op, Op::kSlice);
}

TEST(Lower, AWindowBelongsToTheCache) {
  const auto text = replaced(testing::tiny_mir("bf16"), "scale=0.35}", "scale=0.35 window=16}");
  const auto p = lower(graph(text), FloatPrecision::kKeep);
  ASSERT_TRUE(p.ok());
  EXPECT_EQ(p->caches[0].window, 16);
  EXPECT_EQ(p->caches[1].window, 0);
}

TEST(Lower, RefusesAnOutputThatIsAPart) {
  const auto text = replaced(testing::tiny_mir("bf16"), "x3 = add x2, d : f32[T, 24]\n  output x3",
                             "x3 = add x2, d : f32[T, 24]\n  z = slice x3 {start=0 len=24} : f32[T, 24]\n  output z");
  EXPECT_TRUE(lower(graph(text), FloatPrecision::kKeep).ok());  // the whole value under another name
  const auto part =
      replaced(testing::tiny_mir("bf16"),
               "d = linear h, weight=mlp.down.weight : f32[T, 24]\n  x3 = add x2, d : f32[T, 24]\n  output x3",
               "d = linear h, weight=mlp.down.weight : f32[T, 24]\n  x3 = add x2, d : f32[T, 24]\n  z = slice gu "
               "{start=3 len=24} : f32[T, 24]\n  output z");
  const auto p = lower(graph(part), FloatPrecision::kKeep);
  ASSERT_FALSE(p.ok());
  EXPECT_NE(p.error().message().find("block 'dense'"), std::string::npos) << p.error().message();
}

TEST(Precision, Names) {
  EXPECT_TRUE(parse_precision("").ok());
  EXPECT_TRUE(parse_precision("fp32").ok());
  const auto p = parse_precision("fp16");
  ASSERT_FALSE(p.ok());
  EXPECT_EQ(p.error().code(), ErrorCode::kUsage);
}

TEST(Fallbacks, FloatMatricesOfAnInt8Model) {
  EXPECT_TRUE(find_fallbacks(graph(testing::tiny_mir("bf16"))).empty());  // not an int8 model
  EXPECT_TRUE(find_fallbacks(graph(testing::tiny_mir("w8a8"))).empty());  // router and head are float by design
  EXPECT_TRUE(find_fallbacks(graph(testing::tiny_mir("w4a8_g128"))).empty());
  auto text = testing::tiny_mir("w8a8");
  const size_t moe = text.find("block moe");
  text = text.substr(0, moe) + replaced(replaced(text.substr(moe), "attn.o.weight : w8a8", "attn.o.weight : bf16"),
                                        "linear oq, weight=attn.o", "linear o, weight=attn.o");
  const auto f = find_fallbacks(graph(text));
  ASSERT_EQ(f.size(), size_t(1));
  EXPECT_EQ(f[0].where, "layers 1-2: attn.o.weight");
  EXPECT_NE(f[0].why.find("BF16"), std::string::npos);
  EXPECT_NE(f[0].what.find("reads 1.54 kB of weights instead of 768 B, and 128 B of floats as input in each"), std::string::npos) << f[0].what;
  EXPECT_EQ(layers_text({0, 1, 2, 5, 7, 8}), "layers 0-2, 5, 7-8");
  EXPECT_EQ(layers_text({4}), "layer 4");
}

}  // namespace
}  // namespace mi::compiler
