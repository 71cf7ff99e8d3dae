#include "tools/machine.h"

#include <gtest/gtest.h>

#include "tools/testing.h"

namespace mi::tools {
namespace {

TEST(MachineTest, JsonRoundTrip) {
  Machine m = testing::machine();
  m.limits->notes = {"doubtful"};
  const auto back = parse_machine(machine_json(m), "x");
  ASSERT_TRUE(back.ok()) << back.error().message();
  EXPECT_EQ(machine_json(*back), machine_json(m));
  m.limits.reset();
  EXPECT_FALSE(parse_machine(machine_json(m), "x")->limits);
  Json j = machine_json(testing::machine());
  j["treads"] = 3;
  EXPECT_NE(parse_machine(j, "base.json: machine").error().message().find("did you mean 'threads'"), std::string::npos);
  j = machine_json(testing::machine());
  j["limits"]["int8_gops"]["all"] = -1;
  EXPECT_FALSE(parse_machine(j, "x").ok());
}

TEST(MachineTest, DifferencesAreSentences) {
  const Machine a = testing::machine();
  Machine b = a;
  EXPECT_EQ(machine_difference(a, b), "");
  b.limits->read_gbs.all *= 1.4;
  EXPECT_EQ(machine_difference(a, b), "") << "one class";
  b.limits->read_gbs.all = a.limits->read_gbs.all * 1.6;
  EXPECT_NE(machine_difference(a, b).find("GB/s"), std::string::npos);
  EXPECT_NE(machine_difference(b, a).find("GB/s"), std::string::npos);
  b.limits.reset();
  EXPECT_EQ(machine_difference(a, b), "") << "not measured on one side";
  b = a;
  b.threads = 7;
  EXPECT_NE(machine_difference(a, b).find("--threads 7"), std::string::npos);
  b = a;
  b.isa = "avx2";
  EXPECT_NE(machine_difference(a, b).find("MI_FORCE_ISA"), std::string::npos);
  b = a;
  b.cpu = "another";
  EXPECT_NE(machine_difference(a, b).find("another"), std::string::npos);
}

TEST(MachineTest, RunsSavedWithoutARateForBfloat16HaveTheFloatRate) {
  Json j = machine_json(testing::machine());
  EXPECT_EQ(parse_machine(j, "x")->limits->bf16_gflops.all, 400);
  j["limits"].erase("bf16_gflops");
  EXPECT_EQ(parse_machine(j, "x")->limits->bf16_gflops.all, 200);
}

TEST(MachineTest, TheTighterBoundCounts) {
  const Machine m = testing::machine();  // 40 GB/s, 1000 int8 GOPS, 200 GFLOPS
  const LimitShare memory = limit_share(m, 20e9, 100e9, 0, 1);
  EXPECT_EQ(memory.bound, Bound::kMemory);
  EXPECT_DOUBLE_EQ(memory.share, 0.5);
  const LimitShare arithmetic = limit_share(m, 4e9, 400e9, 60e9, 2);
  EXPECT_EQ(arithmetic.bound, Bound::kArithmetic);
  EXPECT_DOUBLE_EQ(arithmetic.share, (0.4 + 0.3) / 2) << "int8 and float one after the other";
  EXPECT_DOUBLE_EQ(limit_share(m, 0, 0, 60e9, 1, 80e9).share, 0.3 + 0.2) << "pairs of bfloat16 at 400 GFLOPS";
  EXPECT_EQ(limit_share(m, 0, 0, 0, 1).bound, Bound::kNone);
  Machine unknown = m;
  unknown.limits.reset();
  EXPECT_EQ(limit_share(unknown, 1e9, 1e9, 0, 1).bound, Bound::kNone);
}

}  // namespace
}  // namespace mi::tools
