#include "ir/edit.h"

#include <gmock/gmock.h>

#include "ir/mir_dir.h"
#include "ir/pipeline.h"
#include "ir/stats.h"
#include "ir/testing.h"

namespace mi::ir {
namespace {

using testing::graph_text;
using ::testing::HasSubstr;
using testing::legal_graph;
using testing::model_text;

bool linear_mark(const WeightDecl& d) {
  return d.shape.size() >= 2 && (d.mark == Mark::kAttention || d.mark == Mark::kExpert ||
                                 d.mark == Mark::kSharedExpert || d.mark == Mark::kDense);
}

TEST(ToW8A8, SharesOneQuantizePerValue) {
  Graph g = legal_graph(model_text(R"(block a layers = 0 {
    input x : f32[T, 8]
    weight r : f32 [4, 8] router
    weight gate : bf16 [4, 6, 8] expert
    weight up : bf16 [4, 6, 8] expert
    weight down : bf16 [4, 8, 6] expert
    weight s : bf16 [8, 8] shared_expert
    l = linear x, weight=r : f32[T, 4]
    rt = route l {experts=4 k=2} : route[T, 2]
    g = expert_linear x, rt, weight=gate : f32[P, 6]
    u = expert_linear x, rt, weight=up : f32[P, 6]
    h = activation g, u : f32[P, 6]
    d = expert_linear h, rt, weight=down : f32[P, 8]
    m = expert_combine d, rt : f32[T, 8]
    y = linear x, m, weight=s : f32[T, 8]
    output y })"));
  const Graph expected = legal_graph(model_text(R"(block a layers = 0 {
    input x : f32[T, 8]
    weight r : f32 [4, 8] router
    weight gate : w8a8 [4, 6, 8] expert
    weight up : w8a8 [4, 6, 8] expert
    weight down : w8a8 [4, 8, 6] expert
    weight s : w8a8 [8, 8] shared_expert
    l = linear x, weight=r : f32[T, 4]
    rt = route l {experts=4 k=2} : route[T, 2]
    x_q = quantize x : q8[T, 8]
    g = expert_linear x_q, rt, weight=gate : f32[P, 6]
    u = expert_linear x_q, rt, weight=up : f32[P, 6]
    h = activation g, u : f32[P, 6]
    h_q = quantize h : q8[P, 6]
    d = expert_linear h_q, rt, weight=down : f32[P, 8]
    m = expert_combine d, rt : f32[T, 8]
    y = linear x_q, m, weight=s : f32[T, 8]
    output y })"));
  const auto s = to_w8a8(g, [](int32_t, const WeightDecl& d) { return linear_mark(d); });
  ASSERT_TRUE(s.ok()) << s.error().message();
  EXPECT_EQ(print(g), print(expected));
  // Doing it again changes nothing: the quantize nodes that are there are used.
  ASSERT_TRUE(to_w8a8(g, [](int32_t, const WeightDecl& d) { return linear_mark(d); }).ok());
  EXPECT_TRUE(g == expected) << print(g);
}

TEST(ToW8A8, SplitsBlocksWhereLayersDiffer) {
  Graph g = legal_graph(graph_text("m3_small.mir"));
  const auto s = to_w8a8(g, [](int32_t layer, const WeightDecl& d) {
    return linear_mark(d) && !(layer == 2 && d.name == "moe.experts.down.weight");
  });
  ASSERT_TRUE(s.ok()) << s.error().message();
  ASSERT_EQ(g.blocks.size(), 4u);
  EXPECT_EQ(g.blocks[1].name, "moe");
  EXPECT_EQ(g.blocks[2].name, "moe.2");
  EXPECT_EQ(g.blocks[2].layers, std::vector<int32_t>{2});
  auto down = [](const Block& b) {
    return std::find_if(b.weights.begin(), b.weights.end(),
                        [](const WeightDecl& d) { return d.name == "moe.experts.down.weight"; })
        ->format;
  };
  EXPECT_EQ(down(g.blocks[1]), WeightFormat::kW8A8);
  EXPECT_EQ(down(g.blocks[2]), WeightFormat::kFloat);
}

// A format of its own for every matrix: the plan of mixed precision.
TEST(ToQuantized, EachMatrixInItsOwnFormat) {
  Graph g = legal_graph(graph_text("m3_small.mir"));
  const auto s = to_quantized(g, [](int32_t layer, const WeightDecl& d) {
    if (!linear_mark(d)) return QuantFormat{};
    if (d.mark == Mark::kAttention) return QuantFormat{WeightFormat::kW8A8};
    return QuantFormat{WeightFormat::kW4A8, d.mark == Mark::kExpert && layer == 2 ? 32 : 128};
  });
  ASSERT_TRUE(s.ok()) << s.error().message();
  ASSERT_EQ(g.blocks.size(), 4u) << "layer 2 differs from the other of its kind";
  const std::string text = print(g);
  EXPECT_THAT(text, HasSubstr("weight attn.q.weight           : w8a8 [16, 8] attention"));
  EXPECT_THAT(text, HasSubstr("weight moe.experts.down.weight : w4a8_g32 [4, 8, 6] expert"));
  EXPECT_THAT(text, HasSubstr("weight moe.experts.down.weight : w4a8_g128 [4, 8, 6] expert"));
  const Graph again = legal_graph(text);
  EXPECT_TRUE(again == g);
  const auto runs = run_pipeline(g, {});
  ASSERT_TRUE(runs.ok()) << runs.error().message();
  EXPECT_THAT(print(g), HasSubstr("grouped_experts"));
}

TEST(ToW8A8, RefusesWhatCannotBeInt8) {
  Graph g = legal_graph(graph_text("m3_small.mir"));
  auto s = to_w8a8(g, [](int32_t, const WeightDecl& d) { return d.mark == Mark::kEmbedding; });
  ASSERT_FALSE(s.ok());
  EXPECT_THAT(s.error().message(), HasSubstr("weight embed.weight has to be float, it is w8a8"));
  g = legal_graph(graph_text("m3_small.mir"));
  s = to_w8a8(g, [](int32_t layer, const WeightDecl& d) { return layer == 0 && d.mark == Mark::kNorm; });
  ASSERT_FALSE(s.ok());
  EXPECT_THAT(s.error().message(), HasSubstr("w8a8 is for matrices"));
}

TEST(ToW8A8, TakesTheHeadWhenAsked) {
  Graph g = legal_graph(graph_text("m3_small.mir"));
  ASSERT_TRUE(to_w8a8(g, [](int32_t layer, const WeightDecl& d) { return layer < 0 && d.mark == Mark::kHead; }).ok());
  EXPECT_THAT(print(g),
              HasSubstr("y_q    = quantize y : q8[L, 8]\n  logits = linear y_q, weight=head.weight : f32[L, 32]"));
}

TEST(Blocks, SplitAndMergeAreInverse) {
  const std::string body = "{ input x : f32[T, 8] y = scale x {factor=2} : f32[T, 8] output y }";
  const Graph g =
      legal_graph(model_text("block moe layers = 0, 2..5 " + body +
                                 " block moe.2 layers = 1 { input x : f32[T, 8] y = scale x : f32[T, 8] output y }",
                             6));
  Graph s = g;
  split_layers(s, [](const Block& b, int32_t layer) { return b.name == "moe" ? std::to_string(layer % 3) : "same"; });
  ASSERT_TRUE(verify(s).ok());
  ASSERT_EQ(s.blocks.size(), 4u);
  EXPECT_EQ(s.blocks[0].name, "moe");
  EXPECT_EQ(s.blocks[0].layers, (std::vector<int32_t>{0, 3}));
  EXPECT_EQ(s.blocks[1].name, "moe.3");
  EXPECT_EQ(s.blocks[1].layers, (std::vector<int32_t>{2, 5}));
  EXPECT_EQ(s.blocks[2].name, "moe.4");
  EXPECT_EQ(s.blocks[2].layers, (std::vector<int32_t>{4}));
  EXPECT_TRUE(s.blocks[3] == g.blocks[1]);
  merge_equal_blocks(s);
  EXPECT_TRUE(s == g) << print(s);
}

TEST(Blocks, InsertRemoveReplace) {
  Graph g = legal_graph(model_text(
      "block a layers = 0 { input x : f32[T, 8] y = scale x : f32[T, 8] z = add y, y : f32[T, 8] output z }"));
  Block& b = g.blocks[0];
  const ValueId c = new_value(b, "y", {Rows::kToken, 8, Elem::kF32});
  insert_node(b, 1, Node{Op::kClamp, {1}, {c}, {}, ClampParams{-1, 1}});
  b.nodes[2].in = {c, 1};
  replace_uses(b, 1, 0);
  remove_node(b.nodes[0]);
  tidy(b);
  const Graph expected =
      legal_graph(model_text("block a layers = 0 { input x : f32[T, 8] y_2 = clamp x {lo=-1 hi=1} : f32[T, 8] z = add "
                             "y_2, x : f32[T, 8] output z }"));
  EXPECT_TRUE(g == expected) << print(g);
}

TEST(Stats, CountsTheSmallModel) {
  Graph g = legal_graph(graph_text("m3_small.mir"));
  const GraphStats s = stats_of(g);
  const int64_t attn = 16 * 8 + 2 * 4 * 8 + 8 * 16 + 8;  // q, k, v, o and the norm before
  const int64_t dense = attn + 2 * 4 + 8 + 3 * 12 * 8;
  const int64_t moe_fixed = attn + 8 + 4 * 8 + 4 + 3 * 6 * 8, experts = 4 * 3 * 6 * 8;
  const int64_t sparse = attn + 2 * 4 * 8;
  EXPECT_EQ(s.total_params, 32 * 8 + dense + 2 * (moe_fixed + experts) + sparse + 8 + 32 * 8);
  EXPECT_EQ(s.active_params, dense + 2 * (moe_fixed + experts / 2) + sparse + 8 + 32 * 8);
  ASSERT_EQ(s.caches.size(), 4u);
  EXPECT_EQ(s.caches[3].elements(), 8 + 4);
  EXPECT_EQ(s.kv_bytes_per_token(2), 2 * (4 * 8 + 4));
  EXPECT_EQ(s.nodes, 1 + 18 + 2 * 24 + 12 + 3);

  // A tied head is stored once and active; int8 halves the bytes and adds scales.
  g.epilogue.weights[1] = g.prologue.weights[0];
  ASSERT_TRUE(to_w8a8(g, [](int32_t, const WeightDecl& d) { return d.mark == Mark::kExpert; }).ok());
  const GraphStats t = stats_of(g);
  EXPECT_EQ(t.total_params, s.total_params - 32 * 8);
  EXPECT_EQ(t.active_params, s.active_params);
  const auto group =
      std::find_if(t.groups.begin(), t.groups.end(), [](const WeightGroup& w) { return w.mark == Mark::kExpert; });
  ASSERT_NE(group, t.groups.end());
  EXPECT_EQ(group->format, "w8a8");
  EXPECT_EQ(group->params, 2 * experts);
  EXPECT_EQ(group->bytes, 2 * (experts + 4 * 4 * (6 + 6 + 8)));
}

TEST(Stats, Int4BytesAreThoseOfTheFiles) {
  Graph g = legal_graph(graph_text("m3_small.mir"));
  ASSERT_TRUE(to_quantized(g, [](int32_t, const WeightDecl& d) {
                return d.mark == Mark::kExpert ? QuantFormat{WeightFormat::kW4A8, 32} : QuantFormat{};
              }).ok());
  const GraphStats s = stats_of(g);
  const auto group =
      std::find_if(s.groups.begin(), s.groups.end(), [](const WeightGroup& w) { return w.mark == Mark::kExpert; });
  ASSERT_NE(group, s.groups.end());
  EXPECT_EQ(group->format, "w4a8_g32");
  EXPECT_EQ(group->params, 2 * 4 * 3 * 6 * 8);
  EXPECT_EQ(group->bytes, 2 * 4 * (3 * 6 * 8 / 2 + 4 * (6 + 6 + 8)));
  int64_t declared = 0;
  for (const auto& d : declared_tensors(g))
    declared += *shape_count(d.shape) * int64_t(dtype_bytes(d.dtype));
  EXPECT_EQ(s.weight_bytes, declared);
}

// ---- the pipeline

TEST(Pipeline, FusesTheSmallModelInInt8) {
  Graph g = legal_graph(graph_text("m3_small.mir"));
  ASSERT_TRUE(to_w8a8(g, [](int32_t, const WeightDecl& d) { return linear_mark(d); }).ok());
  const auto runs = run_pipeline(g, {});
  ASSERT_TRUE(runs.ok()) << runs.error().message();
  EXPECT_EQ(print(g), print(legal_graph(graph_text("m3_small_w8a8_fused.mir"))));
  ASSERT_EQ(runs->size(), passes().size());
  for (const PassRun& r : *runs) {
    EXPECT_EQ(r.changed, r.name != "dead_code" && r.name != "fold_constants" && r.name != "share_buffers") << r.name;
    EXPECT_FALSE(r.skipped);
  }
  EXPECT_LT(runs->back().nodes_after, runs->front().nodes_before);
}

TEST(Pipeline, LevelAndNamesSwitchPassesOff) {
  const Graph plain = legal_graph(graph_text("m3_small.mir"));
  Graph g = plain;
  PipelineOptions o;
  o.opt_level = 0;
  auto runs = run_pipeline(g, o);
  ASSERT_TRUE(runs.ok());
  EXPECT_TRUE(g == plain);
  for (const PassRun& r : *runs) EXPECT_TRUE(r.skipped == (r.name != "share_buffers") && !r.changed) << r.name;

  o.opt_level = 1;
  o.disabled = {"group_experts", "fuse_qkv"};
  std::vector<std::string> seen;
  o.after_each = [&](const PassRun& r, const Graph&) { seen.push_back(r.name + (r.skipped ? " off" : "")); };
  ASSERT_TRUE(run_pipeline(g, o).ok());
  EXPECT_THAT(seen, ::testing::ElementsAre("fold_constants", "fuse_qkv off", "fuse_gate_up", "fuse_norm_quantize",
                                           "fuse_rope_append", "fuse_residual", "group_experts off",
                                           "fuse_activation_quantize", "dead_code", "share_buffers"));
  EXPECT_THAT(print(g), ::testing::Not(HasSubstr("grouped_experts")));
  EXPECT_THAT(print(g), HasSubstr("gate_up"));

  o.disabled = {"fuse_qvk"};
  runs = run_pipeline(g, o);
  ASSERT_FALSE(runs.ok());
  EXPECT_EQ(runs.error().code(), ErrorCode::kUsage);
  EXPECT_THAT(runs.error().message(), HasSubstr("there is no pass 'fuse_qvk' (did you mean 'fuse_qkv'?)"));
}

TEST(Pipeline, WhatIsIgnoredStaysAsItIs) {
  const Graph plain = legal_graph(graph_text("m3_small.mir"));  // layer 0 dense, 1 and 2 moe, 3 moe with a block index
  const auto fuse = [&](const std::string& name) {
    Graph g = plain;
    PipelineOptions o;
    o.rules.ignores = [&](const std::string& n) { return n == name; };
    EXPECT_TRUE(run_pipeline(g, o).ok()) << name;
    return g;
  };
  const auto count = [](const Block& b, Op op) {
    return std::count_if(b.nodes.begin(), b.nodes.end(), [&](const Node& n) { return n.op == op; });
  };
  // One layer of a block gets a block of its own; the weight is in no stack, the others are.
  const Graph q = fuse("layers.2.attn.q.weight");
  EXPECT_EQ(q.blocks.size(), plain.blocks.size() + 1);
  EXPECT_EQ(count(q.block_of(2), Op::kLinear), count(q.block_of(1), Op::kLinear) + 1);
  for (const Block& b : q.blocks)
    for (const Node& n : b.nodes) EXPECT_FALSE(n.pinned);
  EXPECT_EQ(count(q.block_of(2), Op::kSlice), 2);
  EXPECT_EQ(count(q.block_of(2), Op::kGroupedExperts), 1);
  // By the name of a result.
  const Graph experts = fuse("layers.1.d");
  EXPECT_EQ(count(experts.block_of(1), Op::kGroupedExperts), 0);
  EXPECT_EQ(count(experts.block_of(2), Op::kGroupedExperts), 1);
  EXPECT_TRUE(fuse("nobody") == fuse("nothing"));
}

TEST(Pipeline, AttentionThatReadsASelectionIsFusedByNoPass) {
  const Graph plain = legal_graph(graph_text("m3_small.mir"));
  Graph g = plain;
  ASSERT_TRUE(run_pipeline(g, {}).ok());
  const auto of = [](const Block& b, Op op) {
    for (const Node& n : b.nodes)
      if (n.op == op) return n;
    return Node{};
  };
  for (const Op op : {Op::kAttention, Op::kIndexSelect}) {
    const Node before = of(plain.block_of(3), op), after = of(g.block_of(3), op);
    ASSERT_EQ(before.op, op);
    EXPECT_EQ(before.params, after.params);
    EXPECT_EQ(before.in.size(), after.in.size());
  }
}

TEST(Pipeline, FloatMatricesOfTwoTypesAreStackedWhereTheRulesAllow) {
  const std::string text = testing::model_text(R"(block a layers = 0 {
  input x : f32[T, 8]
  weight q : bf16 [8, 8] attention
  weight k : f32 [8, 8] attention
  weight v : w8a8 [8, 8] attention
  y  = linear x, weight=q : f32[T, 8]
  z  = linear x, weight=k : f32[T, 8]
  xq = quantize x : q8[T, 8]
  w  = linear xq, weight=v : f32[T, 8]
  s  = add y, z : f32[T, 8]
  x2 = add s, w : f32[T, 8]
  output x2
})");
  for (const bool same : {true, false}) {
    Graph g = legal_graph(text);
    PipelineOptions o;
    o.rules.same_precision_only = same;
    ASSERT_TRUE(run_pipeline(g, o).ok());
    EXPECT_EQ(print(g).find("weight=[q, k]") == std::string::npos, same) << print(g);
    EXPECT_EQ(print(g).find(", v]"), std::string::npos);
  }
}

TEST(Pipeline, FoldsTheEmbeddingsFactor) {
  std::string text = testing::model_text("block a layers = 0 {\n  input x : f32[T, 8]\n  y = add x, x : f32[T, 8]\n  output y\n}");
  const std::string from = "x = embed weight=embed.weight : f32[T, 8]";
  text.replace(text.find(from), from.size(), "e = embed weight=embed.weight : f32[T, 8]  x = scale e {factor=12} : f32[T, 8]");
  Graph g = legal_graph(text);
  ASSERT_TRUE(run_pipeline(g, {}).ok());
  EXPECT_THAT(print(g), HasSubstr("x = embed weight=embed.weight {scale=12} : f32[T, 8]"));
}

TEST(Pipeline, RefusesAnIllegalGraph) {
  Graph g = legal_graph(graph_text("m3_small.mir"));
  g.blocks[0].nodes.pop_back();
  const auto runs = run_pipeline(g, {});
  ASSERT_FALSE(runs.ok());
  EXPECT_THAT(runs.error().message(), HasSubstr("illegal before the first pass"));
}

}  // namespace
}  // namespace mi::ir
