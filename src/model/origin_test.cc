#include "model/origin.h"

#include <gmock/gmock.h>

#include "model/testing.h"

namespace mi::model {
namespace {

using namespace testing;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

const Json kTensors = Json::parse(R"({"tensors": {
  "layers.0.moe.experts.gate.weight": {"from": ["m.0.experts.{expert}.gate"]},
  "layers.0.attn.q.weight": {"from": ["m.0.q_a", "m.0.q_b"], "rows": [8, 4]},
  "layers.1.moe.experts.up.weight": {"from": ["m.1.gate_up"], "ops": ["transpose", {"every": [2, 1]}], "shape": [2, 4, 6]},
  "layers.1.moe.experts.gate.weight": {"from": ["m.1.gate_up"], "ops": ["transpose", {"every": [2, 0]}]}}})");

TEST(Origin, NamesLeadToParts) {
  const Origins o = *read_origins(kTensors, "provenance.json");
  const auto expert = parts_from(o, "m.0.experts.12.gate");
  ASSERT_THAT(expert, SizeIs(1));
  EXPECT_EQ(expert[0].tensor, "layers.0.moe.experts.gate.weight");
  EXPECT_EQ(expert[0].expert, 12);
  const auto second = parts_from(o, "m.0.q_b");
  ASSERT_THAT(second, SizeIs(1));
  EXPECT_EQ(second[0].expert, -1);
  EXPECT_EQ(second[0].first_row, 8);
  EXPECT_THAT(parts_from(o, "m.1.gate_up"), SizeIs(2));
  for (const char* none : {"m.0.experts..gate", "m.0.experts.x.gate", "m.0.experts.-1.gate", "m.0.experts.1.gate.weight", "m.0", ""})
    EXPECT_THAT(parts_from(o, none), IsEmpty()) << none;
}

TEST(Origin, IsReadAsWritten) {
  const Origins o = *read_origins(kTensors, "provenance.json");
  // In the order of names: objects with another order of keys are not equal.
  EXPECT_EQ(origins_json(o), Json::parse(R"({
    "layers.0.attn.q.weight": {"from": ["m.0.q_a", "m.0.q_b"], "rows": [8, 4]},
    "layers.0.moe.experts.gate.weight": {"from": ["m.0.experts.{expert}.gate"]},
    "layers.1.moe.experts.gate.weight": {"from": ["m.1.gate_up"], "ops": ["transpose", {"every": [2, 0]}]},
    "layers.1.moe.experts.up.weight": {"from": ["m.1.gate_up"], "ops": ["transpose", {"every": [2, 1]}], "shape": [2, 4, 6]}})"));
}

TEST(Origin, RefusesWhatItCannotUse) {
  EXPECT_THAT(refusal(read_origins(Json::object(), "p.json")), HasSubstr("export the checkpoint again"));
  EXPECT_THAT(refusal(read_origins(Json::parse(R"({"tensors": []})"), "p.json")), HasSubstr("expected an object"));
  for (const char* bad : {R"({"from": []})", R"({"from": ["a", "b"]})", R"({"from": ["a", "b"], "rows": [1]})", R"({"from": ["a"], "ops": ["turn"]})",
                          R"({"from": ["a"], "ops": [{"half": "x"}]})", R"({"from": ["a"], "shape": 3})", R"({})", R"({"from": 3})"})
    EXPECT_THAT(refusal(read_origins(Json{{"tensors", {{"w", Json::parse(bad)}}}}, "p.json")), HasSubstr("tensors.w")) << bad;
}

}  // namespace
}  // namespace mi::model
