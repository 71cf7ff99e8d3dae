#include "tools/cost.h"

#include <gtest/gtest.h>

namespace mi::tools {
namespace {

using artifact::Instr;
using artifact::Manifest;
using artifact::Operand;
using artifact::Packing;
using artifact::WeightTensor;

// A layer by hand: products [10, 20] int8 and, for 4 experts of which 2 are chosen, [6, 10] gate and up, [10, 6] down;
// a float head [30, 10]; attention of 4 heads over 2 KV heads of 8, window 16.
class Hand : public ::testing::Test {
 protected:
  Hand() {
    m.caches = {{2, 8, 8, 0, 16}};
    m.buffers.resize(4);
    m.buffers[3].rows_per_token = 2;
  }
  int32_t matrix(DType d, int64_t experts, int64_t n, int64_t k) {
    WeightTensor t;
    t.packing = d == DType::kI8 ? Packing::kPackedI8 : Packing::kPackedF32;
    t.dtype = d;
    t.experts = experts;
    t.n = n;
    t.k = k;
    t.n_pad = 32;
    t.k_pad = 64;
    t.expert_stride = t.n_pad * t.k_pad * int64_t(dtype_bytes(d));
    if (d == DType::kI8) t.scale_offset = 64, t.colsum_offset = 128;
    m.weights.push_back(t);
    return int32_t(m.weights.size()) - 1;
  }
  int32_t vec(int64_t n, int64_t experts = 1) {
    WeightTensor t;
    t.experts = experts;
    t.n = n;
    t.k = 1;
    m.weights.push_back(t);
    return int32_t(m.weights.size()) - 1;
  }
  static Operand rows(int64_t cols, Rows r = Rows::kToken, int32_t buffer = 0) {
    return {buffer, 0, {r, cols, Elem::kF32}};
  }
  Instr& add(Op op, std::vector<Operand> in, Operand out, std::vector<artifact::InstrWeight> weights, OpParams params) {
    Instr i;
    i.op = op;
    i.layer = 0;
    i.in = std::move(in);
    i.out = {out};
    i.weights = std::move(weights);
    i.params = params;
    m.program.push_back(i);
    return m.program.back();
  }
  Cost cost(const StepShape& s, double experts = 0, kernels::KvKind kv = kernels::KvKind::kBF16) const {
    return instr_cost(m, m.program.back(), s, experts, kv);
  }
  const Operand state{-1, 0, {Rows::kToken, 0, Elem::kState}};
  const Operand route{1, 0, {Rows::kToken, 2, Elem::kRoute}};
  const StepShape three{{{0, 2, 1}, {5, 1, 1}}};  // two sequences: 2 and 1 rows, 2 rows with logits
  Manifest m;
};

TEST_F(Hand, LinearCountsTrueSizes) {
  add(Op::kLinear, {rows(20)}, rows(10), {{Role::kWeight, matrix(DType::kI8, 1, 10, 20)}, {Role::kBias, vec(10)}},
      LinearParams{});
  const Cost c = cost(three);
  EXPECT_EQ(c.int8_ops, 3 * 2 * 10 * 20);
  EXPECT_EQ(c.float_ops, 0);
  EXPECT_EQ(c.weight_bytes, 10 * 20 + 10 * 4 + 10 * 4 + 10 * 4) << "elements, scales, column sums, bias";
  EXPECT_EQ(c.kv_bytes, 0);
  m.program.back().residual = 0;
  EXPECT_EQ(cost(three).float_ops, 3 * 10) << "the residual's additions";
}

TEST_F(Hand, HeadRunsForTheRowsThatWantLogits) {
  add(Op::kLinear, {rows(10)}, rows(30, Rows::kLogit), {{Role::kWeight, matrix(DType::kF32, 1, 30, 10)}},
      LinearParams{});
  EXPECT_EQ(cost(three).float_ops, 2 * 2 * 30 * 10);
  EXPECT_EQ(cost(three).weight_bytes, 30 * 10 * 4);
  const Cost none = cost({{{0, 7, 0}}});
  EXPECT_EQ(none.ops(), 0) << "left out";
  EXPECT_EQ(none.bytes(), 0) << "left out";
}

TEST_F(Hand, ExpertsReadWhatWasChosenAndComputePairs) {
  const int32_t gate = matrix(DType::kI8, 4, 6, 10), up = matrix(DType::kI8, 4, 6, 10),
                down = matrix(DType::kI8, 4, 10, 6);
  add(Op::kGroupedExperts, {rows(10), route}, rows(10),
      {{Role::kGate, gate}, {Role::kUp, up}, {Role::kDown, down}, {Role::kDownBias, vec(10, 4)}},
      GroupedExpertsParams{});
  const Cost c = cost(three, 3);
  EXPECT_EQ(c.int8_ops, 3 * 2 * 2 * (6 * 10 + 6 * 10 + 10 * 6)) << "tokens * k * 2 * sizes";
  EXPECT_EQ(c.weight_bytes, 3 * (60 + 48 + 60 + 48 + 60 + 80 + 40)) << "three experts: elements, 8 bytes a row, bias";
  EXPECT_EQ(c.float_ops, 3 * 2 * (4 * 6 + 2 * 10)) << "activation and combination of each pair";
  EXPECT_EQ(expert_choice(m, m.program.back()).experts, 4);
  EXPECT_EQ(expert_choice(m, m.program.back()).k, 2);
}

TEST_F(Hand, SingleExpertOpsAddUpToTheGroupedOne) {
  const int32_t w = matrix(DType::kI8, 4, 10, 6);
  add(Op::kExpertLinear, {rows(6, Rows::kPair, 3), route}, rows(10, Rows::kPair, 3), {{Role::kWeight, w}},
      ExpertLinearParams{});
  EXPECT_EQ(cost(three, 2).int8_ops, 3 * 2 * 2 * 60);
  EXPECT_EQ(cost(three, 2).weight_bytes, 2 * (60 + 80));
  add(Op::kExpertCombine, {rows(10, Rows::kPair, 3), route}, rows(10), {}, ExpertCombineParams{});
  EXPECT_EQ(cost(three).float_ops, 3 * 2 * 2 * 10);
  add(Op::kActivation, {rows(6, Rows::kPair, 3), rows(6, Rows::kPair, 3)}, rows(6, Rows::kPair, 3), {},
      ActivationParams{});
  EXPECT_EQ(cost(three).float_ops, 3 * 2 * 4 * 6) << "pair rows: k per token";
}

TEST_F(Hand, EmbeddingReadsRows) {
  WeightTensor t;
  t.dtype = DType::kBF16;
  t.n = 1000;
  t.k = 10;
  m.weights.push_back(t);
  add(Op::kEmbed, {}, rows(10), {{Role::kWeight, 0}}, EmbedParams{});
  EXPECT_EQ(cost(three).weight_bytes, 3 * 10 * 2);
}

TEST_F(Hand, AttentionCountsKeysThatAreSeen) {
  AttentionParams p;
  p.heads = 4;
  p.kv_heads = 2;
  p.k_dim = p.v_dim = 8;
  add(Op::kAttention, {rows(32), state}, rows(32), {}, p);
  // Rows at positions 0, 1 of one sequence and 5 of the other see 1, 2 and 6 keys.
  EXPECT_EQ(cost(three).bf16_ops, 4 * 2 * 16 * (1 + 2 + 6));
  EXPECT_EQ(cost(three).float_ops, 0);
  EXPECT_EQ(cost(three, 0, kernels::KvKind::kI8).float_ops, 4 * 2 * 16 * (1 + 2 + 6)) << "widened to float";
  EXPECT_EQ(cost(three).kv_bytes, (2 + 6) * (2 * 8 * 2 + 2 * 16 * 2)) << "bf16 keys of 8, values padded to 16";
  EXPECT_EQ(cost(three, 0, kernels::KvKind::kI8).kv_bytes, (2 + 6) * (2 * 8 + 2 * 16 + 2 * 2 * 4))
      << "int8 with a scale per head";
  std::get<AttentionParams>(m.program.back().params).window = 4;
  EXPECT_EQ(cost({{{100, 2, 2}}}).bf16_ops, 4 * 2 * 16 * (4 + 4));
  EXPECT_EQ(cost({{{100, 2, 2}}}).kv_bytes, 5 * (2 * 8 * 2 + 2 * 16 * 2)) << "the windows of both rows together";
}

TEST_F(Hand, AttentionOverSelectedBlocks) {
  AttentionParams p;
  p.heads = 4;
  p.kv_heads = 2;
  p.k_dim = p.v_dim = 8;
  p.select_block = 16;
  add(Op::kAttention, {rows(32), state, {2, 0, {Rows::kToken, 2 * 3, Elem::kI32}}}, rows(32), {}, p);
  EXPECT_EQ(cost({{{999, 1, 1}}}).bf16_ops, 4 * 2 * 16 * 48) << "three blocks of 16 of a thousand positions";
  EXPECT_EQ(cost({{{999, 1, 1}}}).kv_bytes, 48 * (2 * 8 * 2 + 2 * 16 * 2));
  EXPECT_EQ(cost({{{9, 1, 1}}}).bf16_ops, 4 * 2 * 16 * 10) << "a short context is seen whole";
}

TEST_F(Hand, BlockScoresAreNeededOnlyWhereThereIsAChoice) {
  m.caches[0].index_dim = 8;
  IndexSelectParams p;
  p.heads = 2;
  p.dim = 8;
  p.block = 16;
  p.topk = 3;
  add(Op::kIndexSelect, {rows(16), state}, {2, 0, {Rows::kToken, 2 * 3, Elem::kI32}}, {}, p);
  EXPECT_EQ(cost({{{47, 1, 1}}}).ops(), 0) << "three blocks, all selected";
  EXPECT_EQ(cost({{{47, 1, 1}}}).bytes(), 0);
  EXPECT_EQ(cost({{{47, 2, 1}}}).float_ops, 2 * 2 * 8 * 49) << "the second row has a fourth block";
  EXPECT_EQ(cost({{{47, 2, 1}}}).kv_bytes, 49 * 8 * 2);
}

TEST_F(Hand, BoundsOfAToken) {
  add(Op::kLinear, {rows(20)}, rows(10), {{Role::kWeight, matrix(DType::kI8, 1, 10, 20)}}, LinearParams{});
  const int32_t gate = matrix(DType::kI8, 4, 6, 10), up = matrix(DType::kI8, 4, 6, 10),
                down = matrix(DType::kI8, 4, 10, 6);
  add(Op::kGroupedExperts, {rows(10), route}, rows(10), {{Role::kGate, gate}, {Role::kUp, up}, {Role::kDown, down}},
      GroupedExpertsParams{});
  add(Op::kLinear, {rows(10)}, rows(30, Rows::kLogit), {{Role::kWeight, matrix(DType::kF32, 1, 30, 10)}},
      LinearParams{});
  const double body = 2 * 200 + 2 * 2 * 180, head = 2 * 300;
  EXPECT_EQ(token_ops(m, false), body);
  EXPECT_EQ(token_ops(m, true), body + head);
  EXPECT_TRUE(mostly_int8(m)) << "the float head is not counted";
  EXPECT_EQ(step_weight_bytes(m, 1), (200 + 80) + 2 * (180 + 176) + 300 * 4);
  EXPECT_DOUBLE_EQ(step_weight_bytes(m, 2), (200 + 80) + 3 * (180 + 176) + 300 * 4)
      << "4 (1 - (1 - 2/4)^2) = 3 experts";
}

TEST(ExpectedExperts, FromKToAll) {
  EXPECT_DOUBLE_EQ(expected_experts(128, 8, 1), 8);
  EXPECT_NEAR(expected_experts(128, 8, 32), 111.77, 0.01);
  EXPECT_NEAR(expected_experts(128, 8, 10000), 128, 1e-9);
  EXPECT_EQ(expected_experts(0, 0, 5), 0);
}

TEST(StepShape, IsTheBatchs) {
  const std::vector<int32_t> ids(10, 1), pages{0};
  const StepShape s = shape_of({{{std::span(ids).first(7), 3, pages, 7}, {std::span(ids).first(1), 9, pages, 0}}});
  EXPECT_EQ(s.tokens(), 8);
  EXPECT_EQ(s.logits(), 1);
  EXPECT_EQ(s.parts[1].start, 9);
}

}  // namespace
}  // namespace mi::tools
