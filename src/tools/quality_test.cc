// The verdict on tasks: which limits are exceeded, and which layers did it.
#include "tools/quality.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "model/export.h"
#include "tensor/safetensors.h"

namespace mi::tools {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::IsEmpty;
using ::testing::Not;
namespace fs = std::filesystem;

QualityReport report(double before, double after, int64_t same, int64_t answers) {
  QualityReport r;
  r.groups = {{"code", before, after, -1, {}}, {"json", 0.5, 0.5, -1, {}}};
  r.same = same;
  r.answers = answers;
  return r;
}

TEST(QualityVerdictTest, EachLimitAlone) {
  const QualityLimits l;  // 1 point, 97 %
  EXPECT_THAT(quality_failures(report(0.9, 0.9, 100, 100), l), IsEmpty());
  // A limit that is met exactly is kept, whatever the quotients round to.
  EXPECT_THAT(quality_failures(report(0.9, 0.89, 97, 100), l), IsEmpty());
  EXPECT_THAT(quality_failures(report(0.57, 0.56, 1358, 1400), l), IsEmpty());
  EXPECT_THAT(quality_failures(report(0.9, 0.889, 97, 100), l), ElementsAre(HasSubstr("code: loses 1.10 points, more than 1.00")));
  EXPECT_THAT(quality_failures(report(0.9, 0.9, 96, 100), l), ElementsAre(HasSubstr("only 96.00 % of the greedy answers are the same")));
  EXPECT_THAT(quality_failures(report(0.9, 0.9, 1357, 1400), l), ElementsAre(HasSubstr("the limit is 97.00 %")));
  EXPECT_EQ(quality_failures(report(0.9, 0.8, 50, 100), l).size(), 2u);
  EXPECT_THAT(quality_failures(report(0.8, 0.9, 100, 100), l), IsEmpty());  // better is no loss
  EXPECT_THAT(quality_failures(report(0.9, 0.85, 90, 100), {5, 90}), IsEmpty());
  EXPECT_THAT(quality_failures(report(0.9, 0.9, 0, 100), {1, 0}), IsEmpty());
  EXPECT_EQ(quality_failures(report(0.9, 0.9, 99, 100), {0, 100}).size(), 1u);
  EXPECT_THAT(quality_failures(report(0.9, 0.9, 0, 0), l), IsEmpty());  // no answers, nothing to compare
}

TEST(QualityTextTest, WhoLostAndWhatBringsItBack) {
  QualityReport r = report(0.9, 0.8, 96, 100);
  r.groups[0].restored = {{4, 0.9}, {1, 0.85}, {0, 0.8}, {2, 0.7}};
  r.groups[0].known_tokens = 0.42;
  const std::string text = quality_text(r, {});
  EXPECT_THAT(text, HasSubstr("greedy answers: 96 of 100 the same, token by token (96.0 %)"));
  EXPECT_THAT(text, HasSubstr("code loses 10.00 points (90.00 -> 80.00 %)"));
  EXPECT_THAT(text, HasSubstr("with layer 4 in float: 90.00 %"));
  EXPECT_LT(text.find("layer 4"), text.find("layer 1"));
  EXPECT_THAT(text, Not(HasSubstr("layer 0")));  // brings nothing back
  EXPECT_THAT(text, HasSubstr("42.0 % of its prompts' tokens occur in the calibration text: the set under-represents this group"));
  EXPECT_THAT(text, Not(HasSubstr("json loses")));
  r.groups[0].known_tokens = 0.95;
  EXPECT_THAT(quality_text(r, {}), Not(HasSubstr("under-represents")));
  EXPECT_THAT(quality_text(r, {10, 97}), Not(HasSubstr("loses")));  // not more than the limit

  const Json j = quality_json(r, {});
  EXPECT_EQ(j["exceeded"].size(), 2u);
  EXPECT_EQ(j["same_answers"], 96);
  EXPECT_EQ(j["groups"][0]["restored"][0]["layer"], 4);
  EXPECT_EQ(j["groups"][0]["known_tokens"], 0.95);
  EXPECT_FALSE(j["groups"][1].contains("known_tokens"));
}

// The bundled model, and the same with one layer adding nothing.
constexpr int32_t kDamaged = 1;

struct QualityRunTest : ::testing::Test {
  static Path folder;
  static void SetUpTestSuite() {
    std::string name = (fs::temp_directory_path() / "mi_quality_XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder = name;
    model::ExportOptions e;
    e.model_dir = Path(MI_SOURCE_DIR) / "models" / "mini-m3";
    e.model_type = "minimax-m3";
    e.output = folder / "source";
    const auto made = model::export_model(e);
    ASSERT_TRUE(made.ok()) << made.error().message();
    fs::copy(folder / "source", folder / "result", fs::copy_options::recursive);
    const std::string prefix = "layers." + std::to_string(kDamaged) + ".";
    int changed = 0;
    for (const auto& file : fs::directory_iterator(folder / "result" / "weights")) {
      const Safetensors f = Safetensors::open(file.path()).value();
      std::fstream to(file.path(), std::ios::in | std::ios::out | std::ios::binary);
      for (const auto& t : f.entries()) {
        if (!t.name.starts_with(prefix) || !(t.name.ends_with("down.weight") || t.name.ends_with("attn.o.weight"))) continue;
        to.seekp(std::streamoff(t.begin));
        const std::string zeros(t.end - t.begin, '\0');
        to.write(zeros.data(), std::streamsize(zeros.size()));
        ++changed;
      }
    }
    ASSERT_EQ(changed, 3);
  }
  static void TearDownTestSuite() { fs::remove_all(folder); }

  QualityOptions options(const Path& result) {
    QualityOptions o;
    o.source = folder / "source";
    o.result = result;
    o.eval.data = Path(MI_SOURCE_DIR) / "models" / "mini-m3-eval" / "eval.jsonl";
    o.eval.limit = 6;
    o.eval.only_groups = {"arithmetic", "json"};
    o.eval.score_text = false;
    o.scratch = folder / "piece";
    o.threads = 2;
    return o;
  }
};
Path QualityRunTest::folder;

TEST_F(QualityRunTest, TheSameModelLosesNothing) {
  const QualityReport r = measure_quality(options(folder / "source")).value();
  EXPECT_EQ(r.answers, 12);
  EXPECT_EQ(r.same, 12);
  EXPECT_THAT(quality_failures(r, {0, 100}), IsEmpty());
  for (const GroupQuality& g : r.groups) {
    EXPECT_GT(g.before, 0.5) << g.group;
    EXPECT_EQ(g.before, g.after);
    EXPECT_THAT(g.restored, IsEmpty());
    EXPECT_EQ(g.known_tokens, -1);
  }
}

TEST_F(QualityRunTest, TheLayerThatDidItIsNamed) {
  QualityOptions o = options(folder / "result");
  const quant::Sequences nothing = {{5}};
  o.calibration = &nothing;
  const QualityReport r = measure_quality(o).value();
  EXPECT_LT(r.same, r.answers);
  std::vector<std::string> lost;
  for (const GroupQuality& g : r.groups) {
    if (g.lost_points() <= 1) continue;
    lost.push_back(g.group);
    ASSERT_EQ(g.restored.size(), 6u);
    EXPECT_EQ(g.restored[0].first, kDamaged);
    EXPECT_EQ(g.restored[0].second, g.before);  // the damage is all in this layer
    for (const auto& [layer, accuracy] : g.restored)
      if (layer != kDamaged) {
        EXPECT_EQ(accuracy, g.after) << layer;
      }
    EXPECT_LT(g.known_tokens, 0.5);
  }
  ASSERT_FALSE(lost.empty());
  const std::string text = quality_text(r, {});
  EXPECT_THAT(text, HasSubstr(lost[0] + " loses"));
  EXPECT_THAT(text, HasSubstr("with layer " + std::to_string(kDamaged) + " in float"));
  EXPECT_THAT(text, HasSubstr("under-represents"));
  EXPECT_GE(quality_failures(r, {}).size(), 2u);
}

TEST_F(QualityRunTest, CalibrationThatKnowsThePromptsIsNotBlamed) {
  QualityOptions o = options(folder / "source");
  quant::Sequences all(1);
  for (int32_t id = 0; id < 2048; ++id) all[0].push_back(id);
  o.calibration = &all;
  const QualityReport q = measure_quality(o).value();
  for (const GroupQuality& g : q.groups) EXPECT_EQ(g.known_tokens, 1) << g.group;
}

}  // namespace
}  // namespace mi::tools
