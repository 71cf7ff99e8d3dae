#include "tools/profile/profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "exec/test_model.h"
#include "hw/process_memory.h"
#include "tools/profile/report.h"
#include "tools/testing.h"

namespace mi::tools {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class ProfileTest : public ::testing::Test {
 protected:
  static exec::testing::ModelShape shape() {
    exec::testing::ModelShape s;
    s.packing = artifact::Packing::kPackedI8;
    s.fused = true;
    s.index = true;
    return s;
  }
  ProfileTest() : model_(shape()), pool_(2) {
    options_.prefill = {40};
    options_.decode = 3;
    options_.batch = {1, 2};
    options_.rounds = 2;
    exec::LoadOptions o;
    o.max_tokens_per_step = 32;
    o.kv_pages = profile_kv_tokens(options_) / artifact::kKvPageTokens;
    engine_ = model_.load(pool_, o);
  }
  Profile profile() { return run_profile(*engine_, testing::machine(), options_); }
  exec::testing::TestModel model_;
  hw::ThreadPool pool_;
  ProfileOptions options_;
  std::unique_ptr<exec::Engine> engine_;
};

TEST_F(ProfileTest, TimesCoverEveryInstruction) {
  const Profile p = profile();
  ASSERT_EQ(p.scenarios.size(), 3u);
  EXPECT_EQ(p.scenarios[0].name, "prefill 40");
  EXPECT_EQ(p.scenarios[2].name, "decode, batch 2");
  const auto& program = model_.manifest().program;
  ASSERT_EQ(p.program.size(), program.size());
  for (const Scenario& s : p.scenarios) {
    const bool prefill = s.name.rfind("prefill", 0) == 0;
    EXPECT_EQ(s.steps, prefill ? 2 : 3) << "40 tokens in steps of 32; three steps of decoding";
    EXPECT_EQ(s.tokens, prefill ? 40 : 3 * s.batch);
    ASSERT_EQ(s.instrs.size(), program.size());
    double sum = 0;
    for (size_t n = 0; n < program.size(); ++n) {
      const bool head = program[n].out[0].type.rows == Rows::kLogit;
      EXPECT_EQ(s.instrs[n].calls, prefill && head ? 1 : s.steps) << s.name << ", " << program[n].name;
      EXPECT_GT(s.instrs[n].seconds, 0) << s.name << ", " << program[n].name;
      sum += s.instrs[n].seconds;
    }
    EXPECT_LE(sum, s.seconds * (1 + 1e-9));
    EXPECT_NEAR(sum + s.outside_seconds(), s.seconds, 1e-9);
    EXPECT_EQ(s.round_seconds.size(), 2u);
    EXPECT_NEAR(s.seconds + s.between_seconds, *std::min_element(s.round_seconds.begin(), s.round_seconds.end()), 1e-9)
        << "the fastest round";
    for (const GroupBy by : {GroupBy::kOp, GroupBy::kName, GroupBy::kLayer}) {
      double all = 0, share = 0;
      for (const Group& g : group(p, s, by)) {
        all += g.sum.seconds;
        share += g.share;
      }
      EXPECT_NEAR(all, sum, 1e-9);
      EXPECT_NEAR(share, sum / s.seconds, 1e-9);
    }
    const auto ops = group(p, s, GroupBy::kOp);
    for (size_t i = 1; i < ops.size(); ++i)
      EXPECT_GE(ops[i - 1].sum.seconds, ops[i].sum.seconds) << "the longest first";
  }
}

TEST_F(ProfileTest, ExpertsAreThoseThatTokensChose) {
  const Profile p = profile();
  const int64_t k = shape().k, experts = shape().experts;
  for (const Scenario& s : p.scenarios) {
    ASSERT_EQ(s.experts.size(), 2u) << "layers";
    for (const ExpertLoad& e : s.experts) {
      EXPECT_EQ(std::accumulate(e.tokens.begin(), e.tokens.end(), int64_t{0}), s.tokens * k);
      EXPECT_GE(e.distinct_per_step, double(k));
      EXPECT_LE(e.distinct_per_step, double(std::min(experts, s.tokens * k)));
      EXPECT_GE(e.skew, 1);
      EXPECT_LE(e.skew, double(experts) / double(k) + 1e-9);
    }
    // The weights that the expert instructions read are exactly those experts'.
    double expected = 0, found = 0;
    for (size_t n = 0; n < s.instrs.size(); ++n) {
      const artifact::Instr& i = model_.manifest().program[n];
      const ExpertChoice c = expert_choice(model_.manifest(), i);
      if (c.experts == 0) continue;
      const StepShape one{{{0, 1, 0}}};
      const double per_expert = instr_cost(model_.manifest(), i, one, 1, kernels::KvKind::kF32).weight_bytes;
      expected += s.experts[size_t(i.layer)].distinct_per_step * double(s.steps) * per_expert;
      found += s.instrs[n].cost.weight_bytes;
    }
    EXPECT_GT(found, 0);
    EXPECT_NEAR(found, expected, 1e-6 * expected);
  }
  EXPECT_EQ(p.scenarios[1].experts[0].distinct_per_step, double(k)) << "one token a step";
}

TEST_F(ProfileTest, LoadOfARouteByHand) {
  ExpertCounter::Route r{3, 4, 2, {{2, 0, 1, 1}, {0, 0, 2, 0}}};
  const ExpertLoad l = expert_load(r, {2, 1});
  EXPECT_EQ(l.tokens, (std::vector<int64_t>{2, 0, 3, 1}));
  EXPECT_DOUBLE_EQ(l.distinct_per_step, 2);
  EXPECT_DOUBLE_EQ(l.even_distinct, (3 + 2) / 2.0);
  EXPECT_DOUBLE_EQ(l.skew, 3 * 4 / 6.0);
}

TEST_F(ProfileTest, TraceIsOneStepWithInstructionsInsideLayers) {
  const Profile p = profile();
  const Json t = profile_trace(p);
  const auto& program = model_.manifest().program;
  size_t instructions = 0, layers = 0, steps = 0;
  for (const Json& e : t["traceEvents"]) {
    if (e["ph"] == "M") continue;
    ASSERT_EQ(e["ph"], "X");
    EXPECT_GE(e["ts"].get<double>(), 0);
    EXPECT_GE(e["dur"].get<double>(), 0);
    EXPECT_TRUE(e["pid"].is_number_integer() && e["tid"].is_number_integer());
    if (e["cat"] == "step") {
      ++steps;
    } else if (e["cat"] == "layer") {
      ++layers;
      for (const Json& i : t["traceEvents"]) {
        if (i["pid"] != e["pid"] || !i.contains("args") || !i["args"].contains("layer") ||
            fmt::format("layer {}", i["args"]["layer"].get<int>()) != e["name"])
          continue;
        EXPECT_GE(i["ts"].get<double>(), e["ts"].get<double>());
        EXPECT_LE(i["ts"].get<double>() + i["dur"].get<double>(),
                  e["ts"].get<double>() + e["dur"].get<double>() + 1e-6);
      }
    } else {
      ++instructions;
      EXPECT_TRUE(e["args"].contains("kernel"));
    }
  }
  EXPECT_EQ(steps, 3u);
  EXPECT_EQ(layers, 6u);
  EXPECT_EQ(instructions, 3 * program.size()) << "the middle step of each scenario has logits";
}

TEST_F(ProfileTest, JsonSaysWhatWasMeasured) {
  Profile p = profile();
  p.memory = memory_report(*engine_, exec::plan_memory(engine_->manifest(), engine_->options(), 1), 1000);
  const Json j = profile_json(p);
  EXPECT_EQ(j["machine"]["limits"]["read_gbs"]["all"], 40);
  ASSERT_EQ(j["scenarios"].size(), 3u);
  for (const Json& s : j["scenarios"]) {
    EXPECT_EQ(s["instructions"].size(), p.program.size());
    EXPECT_GT(s["calls_per_step"].get<double>(), 0);
    EXPECT_GT(s["ops"][0]["share"].get<double>(), 0);
    for (const char* key : {"name", "seconds", "calls", "pool_jobs", "weight_bytes", "kv_bytes", "int8_ops",
                            "float_ops", "bf16_ops", "gbs", "gops", "bound", "of_limit", "kernel"})
      EXPECT_TRUE(s["ops"][0].contains(key)) << key;
    EXPECT_EQ(s["layers"].size(), 3u) << "two layers, and what is before and after them as one";
    EXPECT_EQ(s["experts"][0]["tokens"].size(), 6u);
  }
  ASSERT_FALSE(j["kernels"].empty());
  for (const Json& k : j["kernels"]) EXPECT_FALSE(k["why"].get<std::string>().empty());
  EXPECT_EQ(j["memory"]["parts"][0]["planned_bytes"], model_.manifest().memory.weight_bytes);
}

TEST_F(ProfileTest, TextAndPage) {
  Profile p = profile();
  const std::string text = profile_text(p, 3);
  EXPECT_LT(text.find("by operation"), text.find("by instruction, 3 of"));
  EXPECT_THAT(text, HasSubstr("outside instructions"));
  EXPECT_THAT(text, HasSubstr("why:"));
  p.engine = "a<b>";
  const std::string page = profile_html(p);
  EXPECT_THAT(page, HasSubstr("<svg"));
  EXPECT_THAT(page, HasSubstr("a&lt;b&gt;"));
  EXPECT_THAT(page, HasSubstr("Roofline"));
  for (const char* loaded : {"<script", "src=", "href=", "@import", "a<b>"}) EXPECT_THAT(page, Not(HasSubstr(loaded)));
  p.machine.limits.reset();
  EXPECT_THAT(profile_html(p), HasSubstr("were not measured"));
  EXPECT_THAT(profile_text(p, 3), HasSubstr("not measured"));
  EXPECT_TRUE(profile_json(p)["scenarios"][0]["ops"][0]["bound"].is_null());
}

TEST_F(ProfileTest, SharesAboveTheLimitAreExplained) {
  Machine slow = testing::machine();
  slow.limits->read_gbs.all = slow.limits->int8_gops.all = slow.limits->f32_gflops.all =
      slow.limits->bf16_gflops.all = 1e-9;
  const Profile p = run_profile(*engine_, slow, options_);
  ASSERT_EQ(p.notes.size(), 1u);
  EXPECT_THAT(profile_text(p, 3), HasSubstr("shares above 100 %"));
  EXPECT_THAT(profile_html(p), HasSubstr("shares above 100 %"));
  slow.limits->read_gbs.all = slow.limits->int8_gops.all = slow.limits->f32_gflops.all =
      slow.limits->bf16_gflops.all = 1e12;
  EXPECT_TRUE(run_profile(*engine_, slow, options_).notes.empty());
}

TEST_F(ProfileTest, RefusesWhatDoesNotFit) {
  EXPECT_TRUE(check_profile(model_.dir(), options_).ok());
  for (const auto& [prefill, batch, word] : {std::tuple(std::vector<int64_t>{5000}, std::vector<int64_t>{1}, "4096 positions"),
                                             {std::vector<int64_t>{0}, std::vector<int64_t>{}, "too small"},
                                             {std::vector<int64_t>{}, std::vector<int64_t>{0}, "too small"},
                                             {std::vector<int64_t>{}, std::vector<int64_t>{}, "nothing to measure"}}) {
    options_.prefill = prefill;
    options_.batch = batch;
    const Status s = check_profile(model_.dir(), options_);
    ASSERT_FALSE(s.ok()) << word;
    EXPECT_EQ(s.error().code(), ErrorCode::kUsage);
    EXPECT_THAT(s.error().message(), HasSubstr(word));
  }
  EXPECT_EQ(check_profile("none", {}).error().code(), ErrorCode::kBadInput);
}

TEST_F(ProfileTest, MemoryOfTheEngineIsAccountedFor) {
  profile();
  const int64_t runtime = hw::process_memory()->resident / 2;
  const exec::MemoryPlan plan = exec::plan_memory(engine_->manifest(), engine_->options(), 1);
  EXPECT_EQ(plan.kv, engine_->kv_pages() * engine_->kv_page_bytes());
  EXPECT_EQ(plan.activations, engine_->arena_bytes());
  const MemoryReport r = memory_report(*engine_, plan, runtime);
  ASSERT_EQ(r.lines.size(), 6u);
  EXPECT_EQ(r.lines[1].planned, plan.kv);
  EXPECT_EQ(r.lines[5].planned, plan.total() + runtime);
  if (!r.notes.empty()) GTEST_SKIP() << r.notes[0];
  int64_t sum = 0;
  for (size_t i = 0; i < 5; ++i) sum += *r.lines[i].resident;
  EXPECT_EQ(sum, *r.lines[5].resident);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_GT(*r.lines[i].resident, 0) << r.lines[i].name;
    EXPECT_LE(*r.lines[i].resident, r.lines[i].planned) << r.lines[i].name;
  }
  EXPECT_GE(*r.peak, *r.lines[5].resident / 2);
  EXPECT_THAT(memory_text(r), HasSubstr("KV cache"));
  EXPECT_THAT(memory_text(r), HasSubstr("% of the plan"));
  EXPECT_THAT(memory_plot(r), HasSubstr("KV cache, planned: " + human_bytes(double(plan.kv))));
}

TEST(StepTime, UnitsThatFit) {
  EXPECT_EQ(step_time(1.234), "1.23 s");
  EXPECT_EQ(step_time(0.0351), "35.10 ms");
  EXPECT_EQ(step_time(8.02e-7), "0.8 us");
}

TEST(Sparkline, HeightsOfParts) {
  EXPECT_EQ(sparkline({0, 8, 4, 1}, 8), "·█▅▂");
  EXPECT_EQ(sparkline({4, 4, 0, 0, 8, 8}, 3), "▅·█") << "means of equal parts";
  EXPECT_EQ(sparkline({}, 8), "");
}

}  // namespace
}  // namespace mi::tools
