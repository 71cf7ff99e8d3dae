#include <gtest/gtest.h>

#include "exec/test_model.h"
#include "tools/bench/measure.h"
#include "tools/bench/report.h"
#include "tools/bench/share.h"
#include "tools/bench/sweep.h"
#include "tools/cost.h"
#include "tools/testing.h"

namespace mi::tools {
namespace {

TEST(BenchTest, RowsAndRounds) {
  const exec::testing::TestModel model({});
  hw::ThreadPool pool(1);
  const BenchCases cases{{5}, {3}, {2}};
  exec::LoadOptions o;
  o.kv_pages = bench_kv_tokens(cases) / artifact::kKvPageTokens;
  EXPECT_EQ(o.kv_pages, 6) << "two streams of 128 + 64 tokens";
  const auto engine = model.load(pool, o);
  ASSERT_TRUE(check_cases(cases, engine->manifest().model.max_positions).ok());
  const auto rows = measure(*engine, cases, 3);
  ASSERT_EQ(rows.size(), 3u);
  const char* metrics[] = {"prefill", "decode", "batch"};
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(rows[i].metric, metrics[i]);
    ASSERT_EQ(rows[i].rounds.size(), 3u);
    for (const BenchRound& r : rows[i].rounds) {
      EXPECT_GT(r.tok_s, 0);
      EXPECT_GT(r.ttft_s, 0);
      EXPECT_EQ(r.total_tok_s > 0, i > 0);
      if (i == 0) {
        EXPECT_DOUBLE_EQ(r.tok_s * r.ttft_s, 5);
      }
    }
  }
}

TEST(BenchTest, CasesThatCannotBeMeasuredAreRefused) {
  EXPECT_TRUE(check_cases({{5000}, {}, {}}, 0).ok()) << "a model without a limit";
  for (const auto& [cases, word] : {std::pair(BenchCases{{0}, {}, {}}, "--prefill 0"),
                                    {BenchCases{{}, {1}, {}}, "--decode 1"},
                                    {BenchCases{{}, {}, {0}}, "--batch 0"},
                                    {BenchCases{{}, {}, {}}, "nothing to measure"},
                                    {BenchCases{{5000}, {}, {}}, "4096 positions"}}) {
    const Status s = check_cases(cases, 4096);
    ASSERT_FALSE(s.ok()) << word;
    EXPECT_EQ(s.error().code(), ErrorCode::kUsage);
    EXPECT_NE(s.error().message().find(word), std::string::npos) << s.error().message();
  }
}

BenchRow row(const std::string& metric, int64_t n, std::vector<double> tok_s) {
  BenchRow r{metric, n, {}};
  for (double v : tok_s) r.rounds.push_back({v, 1 / v, metric == "prefill" ? 0 : v / 2});
  return r;
}

TEST(BenchTest, ShareOfTheLimit) {
  exec::testing::ModelShape shape;
  shape.packing = artifact::Packing::kPackedI8;
  shape.fused = true;
  const exec::testing::TestModel model(shape);
  const artifact::Manifest& m = model.manifest();
  const Machine machine = testing::machine();  // 40 GB/s, 1000 GOPS int8
  const double body = token_ops(m, false), all = token_ops(m, true);
  ASSERT_TRUE(mostly_int8(m));
  const BenchShare prefill = bench_share(m, machine, row("prefill", 100, {900e3, 1000e3, 1100e3}));
  EXPECT_EQ(prefill.gbs, 0);
  EXPECT_DOUBLE_EQ(prefill.gops, body * 1e6 / 1e9);
  EXPECT_EQ(prefill.limit.bound, Bound::kArithmetic);
  EXPECT_DOUBLE_EQ(prefill.limit.share, body * 1e6 / 1000e9);
  const BenchShare decode = bench_share(m, machine, row("decode", 100, {1e3}));
  EXPECT_DOUBLE_EQ(decode.gbs, step_weight_bytes(m, 1) * 1e3 / 1e9);
  EXPECT_EQ(decode.limit.bound, Bound::kMemory);
  EXPECT_DOUBLE_EQ(decode.limit.share, step_weight_bytes(m, 1) * 1e3 / 40e9);
  const BenchShare batch = bench_share(m, machine, row("batch", 8, {8e3}));
  EXPECT_DOUBLE_EQ(batch.gbs, step_weight_bytes(m, 8) * 1e3 / 1e9) << "a thousand steps of 8";
  EXPECT_DOUBLE_EQ(batch.gops, all * 8e3 / 1e9);
  const BenchShare wide = bench_share(m, machine, row("batch", 100000, {8e3}));
  EXPECT_EQ(wide.limit.bound, Bound::kArithmetic) << "so many streams share the weights that arithmetic is tighter";
  Machine unknown = machine;
  unknown.limits.reset();
  EXPECT_EQ(bench_share(m, unknown, row("decode", 100, {1e3})).limit.bound, Bound::kNone);
}

TEST(BenchTest, JsonKeepsTheProtocol) {
  const BenchShare share{30, 60, {Bound::kMemory, 0.75}};
  const Json decode = bench_json(row("decode", 128, {50, 70, 60}), &share);
  EXPECT_EQ(decode["metric"], "decode");
  EXPECT_EQ(decode["n"], 128);
  EXPECT_EQ(decode["tok_s"], 60);
  EXPECT_DOUBLE_EQ(decode["ttft_s"].get<double>(), 1.0 / 60);
  EXPECT_EQ(decode["total_tok_s"], 30);
  EXPECT_EQ(decode["tok_s_min"], 50);
  EXPECT_EQ(decode["tok_s_max"], 70);
  EXPECT_EQ(decode["tok_s_rounds"], (std::vector<double>{50, 70, 60}));
  EXPECT_EQ(decode["share"], 0.75);
  EXPECT_EQ(decode["bound"], "memory");
  const Json prefill = bench_json(row("prefill", 512, {900}), nullptr);
  EXPECT_FALSE(prefill.contains("total_tok_s"));
  EXPECT_FALSE(prefill.contains("share")) << "not known, not said";
  const BenchShare above{0, 60, {Bound::kArithmetic, 1.2}};
  EXPECT_NE(bench_table({row("prefill", 512, {900})}, {above}).find("more than the limit"), std::string::npos);
}

SweepCell cell(int64_t prompt, int64_t batch, double prefill, double decode) {
  return {prompt, batch, {prefill * 0.99, prefill, prefill * 1.01}, {decode * 0.99, decode, decode * 1.01}, {}};
}

TEST(SweepTest, NamesCellsThatAreSlowerThanASmallerNeighbour) {
  std::vector<SweepCell> cells{cell(1, 1, 50, 60), cell(1, 4, 120, 200), cell(8, 1, 300, 55), cell(8, 4, 250, 40)};
  note_slow_cells(&cells);
  EXPECT_TRUE(cells[0].notes.empty()) << "nothing is smaller";
  EXPECT_TRUE(cells[1].notes.empty());
  EXPECT_TRUE(cells[2].notes.empty()) << "decoding after a longer prompt may be slower";
  ASSERT_EQ(cells[3].notes.size(), 2u);
  EXPECT_EQ(cells[3].notes[0], "prefill: 20 % slower per token than batch 1");
  EXPECT_EQ(cells[3].notes[1], "decode: 38 % slower per token than batch 1");
  cells[3] = cell(8, 4, 299, 60);
  note_slow_cells(&cells);
  EXPECT_TRUE(cells[3].notes.empty()) << "its fastest round is as fast: noise";
  cells[1] = cell(1, 4, 500, 200);
  cells[3] = cell(8, 4, 400, 60);
  note_slow_cells(&cells);
  ASSERT_EQ(cells[3].notes.size(), 1u);
  EXPECT_EQ(cells[3].notes[0], "prefill: 25 % slower per token than prompt 1");
  EXPECT_NE(sweep_table(cells).find("prompt 8 x batch 4, prefill: 25 %"), std::string::npos);
  EXPECT_EQ(sweep_json(cells[3])["sweep"]["notes"].size(), 1u);
}

TEST(SweepTest, MeasuresEveryCell) {
  const exec::testing::TestModel model({});
  hw::ThreadPool pool(1);
  SweepAxes a;
  a.prompts = {1, 5};
  a.batches = {1, 2};
  a.generate = 3;
  a.rounds = 2;
  exec::LoadOptions o;
  o.kv_pages = sweep_kv_tokens(a) / artifact::kKvPageTokens;
  const auto engine = model.load(pool, o);
  ASSERT_TRUE(check_sweep(a, 8).ok());
  EXPECT_FALSE(check_sweep(a, 7).ok());
  const auto cells = run_sweep(*engine, a);
  ASSERT_EQ(cells.size(), 4u);
  for (const SweepCell& c : cells) {
    EXPECT_EQ(c.prefill.size(), 2u);
    EXPECT_EQ(c.decode.size(), 2u);
  }
}

}  // namespace
}  // namespace mi::tools
