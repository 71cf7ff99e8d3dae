// Each rule broken once. Most graphs are broken in memory, because the text form cannot say them.

#include <gmock/gmock.h>

#include <cmath>
#include <functional>

#include "ir/testing.h"

namespace mi::ir {
namespace {

using testing::graph_text;
using ::testing::HasSubstr;
using testing::legal_graph;
using testing::model_text;

std::string error_of(const Graph& g) {
  const auto s = verify(g);
  return s.ok() ? "no error" : s.error().message();
}
std::string error_of_text(const std::string& blocks, int layers = 1) {
  const auto g = parse(model_text(blocks, layers));
  return g.ok() ? error_of(*g) : "does not parse: " + g.error().message();
}
// The error of a block that consists of these statements after "input x : f32[T, 8]".
std::string error_in(const std::string& statements) {
  return error_of_text("block a layers = 0 { input x : f32[T, 8] " + statements + " }");
}

Graph broken(const std::function<void(Graph&)>& damage) {
  Graph g = legal_graph(graph_text("m3_small.mir"));
  damage(g);
  return g;
}

TEST(Verify, AcceptsTheSmallModel) { EXPECT_EQ(error_of(legal_graph(graph_text("m3_small.mir"))), "no error"); }

TEST(Verify, Layers) {
  const std::string a = "{ input x : f32[T, 8] y = scale x : f32[T, 8] output y }";
  EXPECT_EQ(error_of_text("block a layers = 0 " + a, 2), "model: no block holds layer 1");
  EXPECT_EQ(error_of_text("block a layers = 0..1 " + a), "block 'a': layer 1 is not one of the model's 1 layers");
  EXPECT_EQ(error_of_text("block a layers = 1, 0 " + a, 2), "block 'a': its layers have to ascend, 0 follows 1");
  EXPECT_EQ(error_of_text("block a layers = 0 " + a + " block b layers = 0..1 " + a, 2),
            "block 'b': layer 0 belongs to block 'a' already");
  EXPECT_EQ(error_of_text("block a layers = 0 " + a + " block a layers = 1 " + a, 2), "block 'a' is there twice");
  EXPECT_EQ(error_of_text("block prologue layers = 0 " + a), "block 'prologue' is there twice");
  EXPECT_EQ(error_of(broken([](Graph& g) { g.blocks[0].layers.clear(); })), "block 'dense': it stands for no layer");
  EXPECT_EQ(error_of(broken([](Graph& g) { g.blocks[0].name = "de nse"; })),
            "block 'de nse': a name is letters, digits, '_', '.' and '-'");
  EXPECT_EQ(error_of(broken([](Graph& g) { g.info.layers = int64_t(1) << 40; })),
            "model: layers is 1099511627776, expected 0 to 10000");
  EXPECT_EQ(error_of(broken([](Graph& g) { g.info.hidden = 0; })),
            "model: vocab is 32 and hidden is 0, expected sizes above 0");
  EXPECT_EQ(error_of(broken([](Graph& g) { g.epilogue.name = "end"; })),
            "model: prologue and epilogue have these names and no layers");
}

TEST(Verify, FacesOfBlocks) {
  EXPECT_THAT(error_of_text("block a layers = 0 { }"), HasSubstr("it has 0 inputs, expected 1"));
  EXPECT_THAT(error_in("y = scale x : f32[T, 8]"), HasSubstr("it has 0 outputs, expected 1"));
  EXPECT_THAT(error_in("output x"), HasSubstr("its output is its input"));
  EXPECT_THAT(error_in("y = slice x {len=4} : f32[T, 4] output y"), HasSubstr("output 'y' has to be f32[T, 8]"));
  EXPECT_THAT(error_of_text("block a layers = 0 { input x : f32[T, 9] y = slice x {len=8} : f32[T, 8] output y }"),
              HasSubstr("input 'x' has to be f32[T, 8], the residual stream"));
  EXPECT_THAT(error_of(broken([](Graph& g) { g.info.vocab = 33; })),
              HasSubstr("block 'epilogue': output 'logits' has to be f32[L, 33]"));
  EXPECT_THAT(error_of(broken([](Graph& g) { g.epilogue.outputs = {99}; })), HasSubstr("its output is value 99"));
}

TEST(Verify, NamesAndNumbering) {
  EXPECT_THAT(error_of(broken([](Graph& g) { g.blocks[0].values[3].name = "a b"; })),
              HasSubstr("value 'a b': a name is letters, digits and '_'"));
  EXPECT_THAT(error_of(broken([](Graph& g) { g.blocks[0].values[3].name = "q"; })),
              HasSubstr("value 'q' is defined twice"));
  EXPECT_THAT(error_of(broken([](Graph& g) { std::swap(g.blocks[0].nodes[1], g.blocks[0].nodes[2]); })),
              HasSubstr("is used before its definition"));
  EXPECT_THAT(error_of(broken([](Graph& g) { std::swap(g.blocks[0].nodes[1], g.blocks[0].nodes[4]); })),
              HasSubstr("has to be the next value"));
  EXPECT_THAT(error_of(broken([](Graph& g) { g.blocks[0].nodes[2].in[0] = -1; })), HasSubstr("an input is value -1"));
  EXPECT_THAT(error_of(broken([](Graph& g) {
                g.blocks[0].values.push_back({"extra", {}});
              })),
              HasSubstr("value 'extra' is made by no node"));
  EXPECT_THAT(error_of(broken([](Graph& g) { g.blocks[0].inputs = {1}; })),
              HasSubstr("its inputs have to be its first values"));
}

TEST(Verify, Types) {
  EXPECT_THAT(error_in("y = scale x : f32[T, 9] output y"),
              HasSubstr("node 0 (scale 'y'): result 'y' has another type than the op gives"));
  EXPECT_THAT(error_in("y, z = scale x : f32[T, 8], f32[T, 8] output y"), HasSubstr("it has 1 results, here are 2"));
  EXPECT_THAT(error_of(broken([](Graph& g) { g.blocks[0].nodes[0].params = AddParams{}; })),
              HasSubstr("its parameters are those of another op"));
  EXPECT_THAT(error_of(broken([](Graph& g) {
                g.blocks[0].nodes[0].params = NormParams{NAN, false, 1};
              })),
              HasSubstr("eps has to be a finite number"));
}

TEST(Verify, Weights) {
  EXPECT_THAT(error_in("weight w : bf16 [8, 8] dense y = scale x : f32[T, 8] output y"),
              HasSubstr("weight w is read by no node"));
  EXPECT_THAT(error_of(broken([](Graph& g) { g.blocks[0].weights[0].name = "a/b"; })),
              HasSubstr("weight 'a/b': a name is"));
  EXPECT_THAT(error_of(broken([](Graph& g) { g.blocks[0].weights[0].name = "attn.q.weight"; })),
              HasSubstr("weight attn.q.weight is declared twice"));
  EXPECT_THAT(error_of(broken([](Graph& g) { g.epilogue.weights[0].name = "layers.0.norm"; })),
              HasSubstr("belong to layers"));
  EXPECT_THAT(error_of(broken([](Graph& g) { g.blocks[0].weights[0].shape = {}; })),
              HasSubstr("one to three dimensions"));
  EXPECT_THAT(error_of(broken([](Graph& g) { g.blocks[0].weights[0].shape = {0}; })), HasSubstr("a dimension below 1"));
  EXPECT_THAT(error_of(broken([](Graph& g) {
                g.blocks[0].weights[1].shape = {int64_t(1) << 40, int64_t(1) << 40};
              })),
              HasSubstr("is too large"));
  EXPECT_THAT(error_of(broken([](Graph& g) { g.blocks[0].weights[0].dtype = DType::kI32; })),
              HasSubstr("a float weight is F32, BF16 or F16, not I32"));
  EXPECT_THAT(error_of(broken([](Graph& g) { g.blocks[0].weights[1].format = WeightFormat::kW8A8; })),
              HasSubstr("w8a8 is stored as I8, not BF16"));
  EXPECT_THAT(error_of(broken([](Graph& g) { g.blocks[0].weights[1].format = WeightFormat::kW4A8; })),
              HasSubstr("w4a8 is stored as U8, not BF16"));
  EXPECT_THAT(error_of(broken([](Graph& g) {
                WeightDecl& d = g.blocks[0].weights[1];
                d.format = WeightFormat::kW4A8;
                d.dtype = DType::kU8;
                d.group = 48;
              })),
              HasSubstr("a group is 32, 64 or 128, not 48"));
  EXPECT_THAT(error_of(broken([](Graph& g) { g.blocks[0].weights[1].group = 32; })), HasSubstr("only w4a8 has groups"));
  EXPECT_THAT(error_in("weight n : w4a8_g32 [8] norm y = rms_norm x, weight=n : f32[T, 8] output y"),
              HasSubstr("w4a8_g32 is for matrices"));
  EXPECT_THAT(error_in("weight n : w8a8 [8] norm y = rms_norm x, weight=n : f32[T, 8] output y"),
              HasSubstr("w8a8 is for matrices"));
  EXPECT_THAT(error_in("weight w : w8a8 [8, 8] dense weight w_scale : f32 [8] norm xq = quantize x : q8[T, 8] y = "
                       "linear xq, weight=w : f32[T, 8] "
                       "z = rms_norm y, weight=w_scale : f32[T, 8] output z"),
              HasSubstr("weight w_scale: the name is taken by the scales of w"));
  EXPECT_THAT(error_of(broken([](Graph& g) { g.blocks[0].nodes[0].weights[0].weights[0] = 77; })),
              HasSubstr("role 'weight' names weight 77 of"));
  EXPECT_THAT(error_of(broken([](Graph& g) { g.blocks[0].nodes[0].weights[0].weights.clear(); })),
              HasSubstr("role 'weight' names no weight"));
}

TEST(Verify, TiedWeightIsDeclaredEqually) {
  auto tie = [](Graph& g) { g.epilogue.weights[1] = g.prologue.weights[0]; };
  EXPECT_EQ(error_of(broken(tie)), "no error");
  EXPECT_EQ(error_of(broken([&](Graph& g) {
              tie(g);
              g.epilogue.weights[1].dtype = DType::kF32;
            })),
            "block 'epilogue': weight embed.weight is declared differently in the prologue");
}

TEST(Verify, CacheStates) {
  const std::string kv = "k = slice x {len=4} : f32[T, 4] s = kv_append k, k {kv_heads=1 k_dim=4 v_dim=4} : state ";
  const std::string is = "t = index_append k {dim=4} : state ";
  EXPECT_THAT(error_in(kv + "o = attention x, s {heads=2 kv_heads=1 k_dim=4 v_dim=4} : f32[T, 8] output o"),
              HasSubstr("no error"));
  EXPECT_THAT(
      error_in(kv + "s2 = kv_append k, k {kv_heads=1 k_dim=4 v_dim=4} : state y = scale x : f32[T, 8] output y"),
      HasSubstr("it is appended to already"));
  EXPECT_THAT(error_in(kv + "o = attention x, s {heads=4 kv_heads=2 k_dim=2 v_dim=2} : f32[T, 8] output o"),
              HasSubstr("has to be the state of a kv_append with the same"));
  EXPECT_THAT(error_in(kv + is + "o = attention x, t {heads=2 kv_heads=1 k_dim=4 v_dim=4} : f32[T, 8] output o"),
              HasSubstr("has to be the state of a kv_append"));
  EXPECT_THAT(
      error_in(kv + is +
               "i = index_select k, s {heads=1 dim=4 block=2 topk=1} : i32[T, 1] y = scale x : f32[T, 8] output y"),
      HasSubstr("has to be the state of an index_append"));
  EXPECT_THAT(
      error_in(kv + is +
               "i = index_select k, t {heads=1 dim=4 block=2 topk=1} : i32[T, 1] "
               "o = attention x, s, i {heads=2 kv_heads=1 k_dim=4 v_dim=4 select_block=4} : f32[T, 8] output o"),
      HasSubstr("an index_select with heads = kv_heads and block = select_block"));
  EXPECT_THAT(error_of(broken([](Graph& g) {
                auto& b = g.prologue;
                b.values.push_back({"s", {Rows::kToken, 0, Elem::kState}});
                b.nodes.push_back(Node{Op::kIndexAppend, {0}, {1}, {}, IndexAppendParams{8}});
              })),
              HasSubstr("only layers have a cache"));
}

// ---- infer(), op by op: what each refuses

TEST(Infer, RefusesWhatDoesNotFit) {
  struct Case {
    const char* statements;
    const char* says;
  };
  const Case cases[] = {
      {"y = embed x : f32[T, 8]", "it takes 0 inputs, here are 1"},
      {"weight w : bf16 [8] norm y = embed weight=w : f32[T, 8]", "has to have shape [vocabulary, hidden]"},
      {"weight w : w8a8 [9, 8] embedding y = embed weight=w : f32[T, 8]", "weight w has to be float"},
      {"weight n : f32 [7] norm y = rms_norm x, weight=n : f32[T, 8]", "weight n has to have shape [8], it has [7]"},
      {"weight n : f32 [8] norm y = rms_norm x, weight=n {groups=3} : f32[T, 8]", "do not divide into 3 groups"},
      {"weight n : f32 [8] norm y = rms_norm x, weight=n {groups=0} : f32[T, 8]", "groups has to be positive"},
      {"weight n : f32 [8] norm y, z = rms_norm x, weight=n : q8[T, 8], f32[T, 8]", "float, int8, or float then int8"},
      {"y = rms_norm x : f32[T, 8]", "it needs a weight of role 'weight'"},
      {"weight n : f32 [8] norm y = scale x, weight=n : f32[T, 8]", "it takes no weight of role 'weight'"},
      {"weight n : f32 [8] norm y = rms_norm x, weight=[n, n] : f32[T, 8]",
       "role 'weight' takes one weight, here are 2"},
      {"weight s : f32 [2] constant y = quantize x, in_scale=s : q8[T, 8]", "has to have shape [1]"},
      {"y = quantize x {saturate=true} : q8[T, 8]", "no in_scale to saturate at"},
      {"q = quantize x : q8[T, 8] y = quantize q : q8[T, 8]", "input 'q' has to be float, it is int8"},
      {"weight w : w8a8 [8, 8] dense y = linear x, weight=w : f32[T, 8]",
       "weight w is w8a8, but input 'x' is float: quantize it first"},
      {"weight w : w4a8_g128 [8, 8] dense y = linear x, weight=w : f32[T, 8]",
       "weight w is w4a8_g128, but input 'x' is float: quantize it first"},
      {"weight w : w4a8_g32 [4, 8] dense weight v : w4a8_g64 [4, 8] dense q = quantize x : q8[T, 8] "
       "y = linear q, weight=[w, v] : f32[T, 8]",
       "stacked weights w and v differ in format"},
      {"weight w : bf16 [8, 8] dense q = quantize x : q8[T, 8] y = linear q, weight=w : f32[T, 8]",
       "weight w is float, but input 'q' is int8"},
      {"h = activation x : q8[T, 8]", "has another type"},
      {"h = activation x : i32[T, 4]", "its result has to be float or int8"},
      {"kv = kv_append x, x {kv_heads=1 k_dim=8 v_dim=8 rotary_dim=4} : state", "needs a weight of role 'inv_freq'"},
      {"weight f : f32 [2] constant kv = kv_append x, x, inv_freq=f {kv_heads=1 k_dim=8 v_dim=8} : state", "rotary_dim has to be positive"},
      {"weight f : f32 [2] constant kv = kv_append x, x, inv_freq=f {kv_heads=2 k_dim=4 v_dim=4 rotary_dim=6} : state", "at most head_dim 4"},
      {"weight w : bf16 [8, 9] dense y = linear x, weight=w : f32[T, 8]", "takes 9 columns, input 'x' has 8"},
      {"weight w : w8a8 [4, 8] dense weight v : f32 [4, 8] dense q = quantize x : q8[T, 8] y = linear q, weight=[w, v] : f32[T, 8]",
       "stacked weights w and v differ in format"},
      {"weight w : bf16 [4, 8] dense weight v : bf16 [4, 9] dense y = linear x, weight=[w, v] : f32[T, 8]",
       "differ in K"},
      {"weight w : bf16 [4, 8] dense weight b : f32 [4] dense y = linear x, weight=[w, w], bias=b : f32[T, 8]",
       "it has 2 weights and 1 biases"},
      {"weight w : bf16 [8, 8] dense weight b : f32 [4] dense y = linear x, weight=w, bias=b : f32[T, 8]",
       "weight b has to have shape [8]"},
      {"weight w : bf16 [8, 8] dense weight b : f32 [8] dense y = linear x, bias=b, weight=w : f32[T, 8]",
       "ordered by role"},
      {"weight w : bf16 [4, 8] dense y = linear x, x, weight=w : f32[T, 4]",
       "input 'x' has to have 4 columns, it has 8"},
      {"y = clamp x {lo=1 hi=0} : f32[T, 8]", "lo 1 is above hi 0"},
      {"weight f : f32 [2] constant y = rope x, inv_freq=f {heads=3 head_dim=4 rotary_dim=4} : f32[T, 12]",
       "has to have 12 columns"},
      {"weight f : f32 [2] constant y = rope x, inv_freq=f {heads=2 head_dim=4 rotary_dim=6} : f32[T, 8]",
       "rotary_dim 6 has to be even and at most head_dim 4"},
      {"weight f : f32 [1] constant y = rope x, inv_freq=f {heads=2 head_dim=4 rotary_dim=4} : f32[T, 8]",
       "has to have shape [2]"},
      {"s = kv_append x, x {kv_heads=2 k_dim=4 v_dim=2} : state", "has to have 4 columns"},
      {"s = kv_append x, x {kv_heads=999999999999 k_dim=999999999999 v_dim=2} : state", "is too large"},
      {"s = kv_append x, x {kv_heads=2 k_dim=4 v_dim=4} : state y = attention x, s {heads=3 kv_heads=2 k_dim=4 "
       "v_dim=4} : f32[T, 8]",
       "no multiple of kv_heads"},
      {"y = attention x, x {heads=2 kv_heads=2 k_dim=4 v_dim=4} : f32[T, 8]",
       "input 'x' has to be a cache state, it is float"},
      {"s = kv_append x, x {kv_heads=2 k_dim=4 v_dim=4} : state y = attention x, s {heads=2 kv_heads=2 k_dim=4 v_dim=4 "
       "select_block=4} : f32[T, 8]",
       "a selection and select_block > 0 go together"},
      {"weight k : f32 [3] constant s = kv_append x, x {kv_heads=2 k_dim=4 v_dim=4} : state "
       "y = attention x, s, sinks=k {heads=2 kv_heads=2 k_dim=4 v_dim=4} : f32[T, 8]",
       "weight k has to have shape [2]"},
      {"s = index_append x {dim=4} : state", "has to have 4 columns"},
      {"s = index_append x {dim=8} : state y = index_select x, s {heads=1 dim=8 block=4 topk=2 local=3} : i32[T, 2]",
       "local 3 has to be between 0 and topk 2"},
      {"h = slice x {len=4} : f32[T, 4] y = add x, h : f32[T, 8]", "input 'h' has to have 8 columns"},
      {"h = select_rows x : f32[L, 8] y = add x, h : f32[T, 8]", "input 'h' has to have token rows, it has logit rows"},
      {"h = slice x {len=3} : f32[T, 3] y = activation h : f32[T, 1]", "odd number of columns"},
      {"y = route x {experts=8 k=9} : route[T, 9]", "k 9 has to be between 1 and 8 experts"},
      {"y = route x {experts=8 k=4 groups=4 groups_keep=1} : route[T, 4]", "hold fewer than k 4"},
      {"y = route x {experts=8 k=2 groups=8 groups_keep=2} : route[T, 2]", "groups of one expert have no two largest"},
      {"y = route x {experts=4 k=2} : route[T, 2]", "has to have 4 columns"},
      {"weight e : bf16 [4, 8, 8] expert r = route x {experts=8 k=2} : route[T, 2] y = expert_linear x, r, weight=e : "
       "f32[P, 8]",
       "route 'r' chooses among 8 experts, the weights hold 4"},
      {"weight e : bf16 [8, 8] expert r = route x {experts=8 k=2} : route[T, 2] y = expert_linear x, r, weight=e : "
       "f32[P, 8]",
       "has to have shape [experts, N, K]"},
      {"r = route x {experts=8 k=2} : route[T, 2] y = expert_combine x, r : f32[T, 8]",
       "input 'x' has to have pair rows"},
      {"weight g : bf16 [8, 4, 8] expert weight d : bf16 [8, 8, 5] expert r = route x {experts=8 k=2} : route[T, 2] "
       "y = grouped_experts x, r, gate=g, up=g, down=d : f32[T, 8]",
       "weight d has to have shape [8, 8, 4]"},
      {"weight g : bf16 [8, 4, 8] expert weight u : f32 [8, 4, 8] expert weight d : bf16 [8, 8, 4] expert r = route x "
       "{experts=8 k=2} : route[T, 2] "
       "y = grouped_experts x, r, gate=g, up=u, down=d : f32[T, 8]",
       "weights g and u differ in format"},
      {"weight g : bf16 [8, 4, 8] expert weight d : bf16 [8, 8, 4] expert weight s : f32 [1] constant r = route x {experts=8 k=2} : "
       "route[T, 2] y = grouped_experts x, r, gate=g, up=g, down=d, in_scale=s : f32[T, 8]",
       "in_scale goes with quantized weights; d is float"},
      {"weight g : bf16 [8, 4, 8] expert weight d : w8a8 [8, 8, 4] expert r = route x {experts=8 k=2} : route[T, 2] "
       "y = grouped_experts x, r, gate=g, up=g, down=d {saturate=true} : f32[T, 8]",
       "no in_scale to saturate at"},
      {"y = sigmoid_mul x, x : f32[T, 8]", "has to have 1 columns"},
      {"y = slice x {start=5 len=4} : f32[T, 4]", "start 5 with len 4 is not inside the 8 columns"},
      {"y = slice x {start=9223372036854775807 len=9223372036854775807} : f32[T, 4]", "is not inside the 8 columns"},
      {"h = select_rows x : f32[L, 8] y = select_rows h : f32[L, 8]", "input 'h' has to have token rows"},
  };
  for (const Case& c : cases) EXPECT_THAT(error_in(c.statements), HasSubstr(c.says)) << c.statements;
}

TEST(BlockBuilder, InfersTypesAndReportsLater) {
  Graph g = legal_graph(model_text("block a layers = 0 { input x : f32[T, 8] y = scale x : f32[T, 8] output y }"));
  Block b;
  b.name = "a";
  b.layers = {0};
  BlockBuilder build(&b);
  const ValueId x = build.input("x", {Rows::kToken, 8, Elem::kF32});
  const WeightDecl decl{"w", DType::kBF16, {8, 8}, WeightFormat::kFloat, Mark::kDense};
  const int32_t w = build.weight(decl);
  EXPECT_EQ(build.weight(decl), w);
  const int32_t bias = build.weight({"b", DType::kBF16, {8}, WeightFormat::kFloat, Mark::kDense});
  const ValueId y = build.node(Op::kLinear, {x}, {{Role::kBias, {bias}}, {Role::kWeight, {w}}}, LinearParams{}, "x");
  EXPECT_EQ(b.values[size_t(y)].name, "x_2");
  EXPECT_EQ(b.values[size_t(y)].type, (ValueType{Rows::kToken, 8, Elem::kF32}));
  build.output(y);
  g.blocks[0] = b;
  EXPECT_EQ(error_of(g), "no error");

  b.outputs.clear();
  build.output(build.node(Op::kRope, {y}, {}, RopeParams{}, "r"));
  g.blocks[0] = b;
  EXPECT_EQ(error_of(g), "block 'a': node 1 (rope 'r'): heads has to be positive, it is 0");
}

}  // namespace
}  // namespace mi::ir
