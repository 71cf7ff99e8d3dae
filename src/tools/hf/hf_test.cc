// Layouts, signs of int4 groups and quantization_config; whole folders are tested in
// tests/system/test_convert_checkpoint.py.

#include <gmock/gmock.h>

#include "base/temp_dir.h"
#include "model/export.h"
#include "model/module_pattern.h"
#include "tensor/int4.h"
#include "tools/convert_checkpoint.h"
#include "tools/hf/config.h"
#include "tools/hf/write.h"

namespace mi::tools::hf {
namespace {

namespace fs = std::filesystem;
using ir::WeightFormat;
using model::ViewOp;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Kind = ViewOp::Kind;

ir::MirDir exported(const std::string& name, const Path& out) {
  model::ExportOptions o;
  o.model_dir = Path(MI_SOURCE_DIR) / "tests" / "data" / "goldens" / name;
  o.output = out;
  const auto r = model::export_model(o);
  EXPECT_TRUE(r.ok()) << r.error().message();
  auto m = ir::MirDir::open(out);
  EXPECT_TRUE(m.ok());
  return std::move(m).value();
}

TEST(ShapeBefore, UndoesEveryOperationThatTells) {
  EXPECT_EQ(shape_before({{Kind::kTranspose, {}}, {Kind::kEvery, {2, 1}}}, {8, 32, 64}, false), (Shape{8, 64, 64}));
  EXPECT_EQ(shape_before({{Kind::kTranspose, {}}}, {8, 32, 64}, false), (Shape{8, 64, 32}));
  EXPECT_EQ(shape_before({{Kind::kHalf, {0}}}, {8, 30, 64}, false), (Shape{8, 60, 64}));
  EXPECT_EQ(shape_before({{Kind::kEvery, {2, 0}}}, {8, 32}, true), (Shape{8, 64}));
  EXPECT_EQ(shape_before({{Kind::kRows, {16, 4}}}, {4, 8}, false), (Shape{20, 8}));
  EXPECT_EQ(shape_before({{Kind::kOrient, {4, 8}}}, {4, 8}, false), (Shape{4, 8}));
  EXPECT_EQ(shape_before({{Kind::kSqueeze, {}}}, {8}, true), std::nullopt);
  EXPECT_EQ(shape_before({{Kind::kReshape, {1, 8}}}, {1, 8}, false), std::nullopt);
  EXPECT_EQ(shape_before({{Kind::kTranspose, {}}}, {8}, true), std::nullopt);
}

TEST(MakePositive, FlipsUnlessANumberHasNoOpposite) {
  for (const int8_t least : {-7, -8}) {
    int8_t q[32];
    for (int i = 0; i < 32; ++i) q[i] = int8_t(i % 15 - 7);
    q[13] = least;
    uint8_t row[16];
    int4_store_row(q, 32, row);
    float scale = -0.25f;
    EXPECT_EQ(make_positive(row, 32, &scale), least == -7);
    EXPECT_EQ(scale, least == -7 ? 0.25f : -0.25f);
    for (int i = 0; i < 32; ++i) EXPECT_EQ(float(int4_at(row, i)) * scale, float(q[i]) * -0.25f) << i;
  }
  uint8_t row[16] = {};  // all -8
  for (float s : {0.0f, 0.5f}) {
    float scale = s;
    EXPECT_TRUE(make_positive(row, 32, &scale));
    EXPECT_EQ(scale, s);
    EXPECT_EQ(row[0], 0);
  }
}

Module module(const std::string& family, int32_t layer, WeightFormat f, int64_t group = 0) {
  std::string name = family;
  if (const size_t at = name.find("{layer}"); at != name.npos) name.replace(at, 7, std::to_string(layer));
  return {name, family, layer, f, group};
}

TEST(QuantizationConfig, OneFormTargetsLinearAndNamesTheRest) {
  const Json q =
      quantization_config({module("m.{layer}.q", 0, WeightFormat::kW8A8),
                           module("m.{layer}.r", 0, WeightFormat::kFloat), module("lm_head", -1, WeightFormat::kFloat)},
                          {"re:^vision\\..*$"});
  EXPECT_EQ(q["format"], "int-quantized");
  EXPECT_EQ(q["ignore"], Json::array({"m.0.r", "lm_head", "re:^vision\\..*$"}));
  ASSERT_EQ(q["config_groups"].size(), 1u);
  const Json& g = q["config_groups"]["group_0"];
  EXPECT_EQ(g["targets"], Json::array({"Linear"}));
  EXPECT_EQ(g["weights"]["strategy"], "channel");
  EXPECT_EQ(g["input_activations"]["strategy"], "token");
  EXPECT_FALSE(g.contains("format"));
}

// The group that a module falls into, as readers decide: the one pattern that matches.
std::string group_of(const Json& q, const std::string& module) {
  std::string found;
  for (const auto& [name, g] : q["config_groups"].items())
    for (const Json& t : g["targets"]) {
      auto p = model::ModulePattern::read(t.get<std::string>(), "x");
      EXPECT_TRUE(p.ok()) << t;
      if (p.ok() && p->matches(module)) {
        EXPECT_TRUE(found.empty() || found == name) << module;
        found = name;
      }
    }
  return found.empty() ? found
                       : q["config_groups"][found].value("format", "") +
                             q["config_groups"][found]["weights"]["group_size"].dump();
}

TEST(QuantizationConfig, MixedFormsHavePatternsThatDoNotOverlap) {
  std::vector<Module> all;
  for (int32_t l = 0; l < 120; ++l) {
    all.push_back(module("m.{layer}.q", l, WeightFormat::kW8A8));
    all.push_back(module("m.{layer}.experts.{expert}.up", l, WeightFormat::kW4A8, l % 2 ? 64 : 32));
    all.push_back(module("m.{layer}.gate", l, WeightFormat::kFloat));
  }
  const Json q = quantization_config(all, {});
  EXPECT_EQ(q["format"], "mixed-precision");
  EXPECT_EQ(q["ignore"].size(), 120u);
  EXPECT_EQ(group_of(q, "m.7.q"), "int-quantizednull");
  EXPECT_EQ(group_of(q, "m.117.experts.99.up"), "pack-quantized64");
  EXPECT_EQ(group_of(q, "m.11.experts.0.up"), "pack-quantized64");
  EXPECT_EQ(group_of(q, "m.110.experts.0.up"), "pack-quantized32");
  EXPECT_EQ(group_of(q, "m.1.gate"), "");
  EXPECT_EQ(group_of(q, "mx7xq"), "");

  const Json two =
      quantization_config({module("a", -1, WeightFormat::kW4A8, 32), module("b", -1, WeightFormat::kW4A8, 128)}, {});
  EXPECT_EQ(two["format"], "pack-quantized");
  EXPECT_EQ(two["config_groups"].size(), 2u);
}

TEST(Plan, NamesAreTheSourcesWithItsWrapper) {
  TempDir dir;
  const ir::MirDir m = exported("minimax_m3_sparse", dir / "mir");
  const auto plan = plan_files(m, Form::kPlain, DType::kBF16);
  ASSERT_TRUE(plan.ok()) << plan.error().message();
  std::map<std::string, const FileTensor*> by_name;
  for (const FileTensor& t : plan->tensors) by_name[t.name] = &t;
  EXPECT_TRUE(by_name.count("language_model.lm_head.weight"));
  ASSERT_TRUE(by_name.count("language_model.model.layers.1.block_sparse_moe.experts.7.w2.weight"));
  EXPECT_EQ(by_name["language_model.model.layers.1.block_sparse_moe.experts.7.w2.weight"]->shape, (Shape{64, 32}));
  EXPECT_EQ(by_name["language_model.model.layers.1.block_sparse_moe.e_score_correction_bias"]->dtype, DType::kF32);
  EXPECT_THAT(plan->skipped, ::testing::Contains("re:^vision_tower\\..*$"));
}

TEST(Plan, PackedExpertsAreOneTensor) {
  TempDir dir;
  const ir::MirDir m = exported("gpt_oss", dir / "mir");
  const auto plan = plan_files(m, Form::kPlain, DType::kBF16);
  ASSERT_TRUE(plan.ok()) << plan.error().message();
  int64_t packed = 0;
  for (const FileTensor& t : plan->tensors)
    if (t.name.ends_with("experts.gate_up_proj")) {
      ++packed;
      EXPECT_EQ(t.pieces.size(), 2u);
      EXPECT_EQ(t.shape, (Shape{8, 64, 64}));
    }
  EXPECT_EQ(packed, m.graph.info.layers);
}

TEST(Plan, WhatDoesNotFitIsRefused) {
  TempDir dir;
  ir::MirDir m = exported("gpt_oss", dir / "mir");
  const auto refusal = [&](const ir::MirDir& mir, Form f = Form::kPlain) {
    const auto plan = plan_files(mir, f, DType::kBF16);
    return plan.ok() ? std::string() : plan.error().message();
  };
  // A tensor that only half of it fills.
  ir::MirDir half = m;
  half.graph.blocks[0].weights.erase(
      std::find_if(half.graph.blocks[0].weights.begin(), half.graph.blocks[0].weights.end(),
                   [](const ir::WeightDecl& d) { return d.name == "moe.experts.up.weight"; }));
  EXPECT_THAT(refusal(half), HasSubstr("gate_up_proj"));
  EXPECT_THAT(refusal(half), HasSubstr("16384 of 32768 numbers"));
  // No source is known, and the recipe is not the program's.
  ir::MirDir foreign = m;
  foreign.provenance["options"] = {{"family_file", "own.yaml"}};
  EXPECT_EQ(refusal(foreign), "");  // what export noted suffices
  foreign.provenance["tensors"].erase("embed.weight");
  EXPECT_THAT(refusal(foreign), HasSubstr("nothing says which tensor of a checkpoint embed.weight is"));
  // Quantized experts inside of a packed tensor.
  for (ir::Block& b : m.graph.blocks)
    for (ir::WeightDecl& d : b.weights)
      if (d.name == "moe.experts.down.weight") d.format = WeightFormat::kW8A8;
  EXPECT_THAT(refusal(m, Form::kCompressedTensors), HasSubstr("packed with others"));
  EXPECT_THAT(refusal(m), HasSubstr("layers.0.moe.experts.down.weight is quantized (w8a8)"));
}

TEST(Config, IsMissingInAnOlderMir) {
  TempDir dir;
  exported("qwen3_moe", dir / "mir");
  fs::remove_all(dir / "mir" / "source");
  CheckpointOptions o;
  o.model = dir / "mir";
  o.output = dir / "out";
  const auto r = convert_to_checkpoint(o);
  ASSERT_FALSE(r.ok());
  EXPECT_THAT(r.error().message(), HasSubstr("source/config.json: is missing"));
  EXPECT_FALSE(fs::exists(dir / "out"));
}

}  // namespace
}  // namespace mi::tools::hf
