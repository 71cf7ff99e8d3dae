// quantization_config: W8A8 of compressed-tensors is taken as it is; what does not fit is named. The arithmetic of the
// other formats: formats/formats_test.cc.

#include "model/quant_scheme.h"

#include <gmock/gmock.h>

#include "model/testing.h"

namespace mi::model {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

constexpr const char* kQ = "model.layers.0.self_attn.q_proj.weight";

// The fixture with its config and tensors open to changes.
struct W8A8 {
  TempDir tmp;
  Json config = load_json(data("ct_w8a8") / "config.json");
  TensorMap tensors = read_tensors(data("ct_w8a8") / "model.safetensors");
  Json& quant() { return config["quantization_config"]; }
  Json& group() { return quant()["config_groups"]["group_0"]; }
  Result<ExportReport> run() {
    write_checkpoint(tmp / "m", config, tensors);
    return export_to(tmp / "m", tmp / "out", [](ExportOptions& o) { o.force = true; });
  }
};

TEST(W8A8, WeightsAndScalesAreKept) {
  W8A8 c;
  const auto r = c.run();
  ASSERT_TRUE(r.ok()) << r.error().message();
  const ir::MirDir m = open_mir(c.tmp / "out");
  const TensorView q = m.weight("layers.0.attn.q.weight");
  EXPECT_EQ(q.dtype, DType::kI8);
  EXPECT_EQ(std::vector(q.data, q.data + q.bytes), c.tensors[kQ].data);
  EXPECT_EQ(to_f32_vector(m.weight("layers.0.attn.q.weight_scale")),
            to_f32_vector(c.tensors[std::string(kQ) + "_scale"].view()));
  const TensorView gate = m.weight("layers.1.moe.experts.gate.weight");
  EXPECT_EQ(gate.shape, (Shape{8, 64, 128}));
  const auto& third = c.tensors["model.layers.1.mlp.experts.3.gate_proj.weight"].data;
  EXPECT_TRUE(std::equal(third.begin(), third.end(), gate.data + 3 * 64 * 128));
  const auto scale = to_f32_vector(m.weight("layers.1.moe.experts.gate.weight_scale"));
  const auto third_scale = to_f32_vector(c.tensors["model.layers.1.mlp.experts.3.gate_proj.weight_scale"].view());
  EXPECT_TRUE(std::equal(third_scale.begin(), third_scale.end(), scale.begin() + 3 * 64));

  const ir::Block& b = m.graph.blocks[0];
  EXPECT_EQ(std::count_if(b.nodes.begin(), b.nodes.end(), [](const ir::Node& n) { return n.op == Op::kQuantize; }),
            4);  // a, o, m, h
  for (const ir::WeightDecl& d : b.weights)
    EXPECT_EQ(d.format == ir::WeightFormat::kW8A8, d.mark == ir::Mark::kAttention || d.mark == ir::Mark::kExpert)
        << d.name;
  EXPECT_THAT(r->notes, Contains(HasSubstr("ignore 'lm_head': 1")));
}

TEST(W8A8, OddActivationsAreRefused) {
  const std::pair<const char*, Json> cases[] = {{"num_bits", "8"}, {"num_bits", 1.5}, {"num_bits", -1}, {"type", 5}, {"symmetric", 1}};
  for (const auto& [key, value] : cases) {
    W8A8 c;
    c.group()["input_activations"][key] = value;
    const auto r = c.run();
    ASSERT_FALSE(r.ok()) << key << value;
    EXPECT_THAT(r.error().message(), AllOf(HasSubstr(std::string("input_activations.") + key), HasSubstr("correct it")));
  }
  W8A8 c;
  c.group()["input_activations"] = "x";
  EXPECT_THAT(c.run().error().message(), HasSubstr("input_activations: expected an object"));
}

TEST(Fp8, BlocksOfMxfp8AreOfItsSize) {
  W8A8 c;
  c.config["quantization_config"] = {{"quant_method", "mxfp8"}, {"weight_block_size", {1, 33}}};
  EXPECT_THAT(c.run().error().message(), AllOf(HasSubstr("[1, 33]"), HasSubstr("[1, 32]")));
}

TEST(W8A8, IgnoredModuleInInt8IsRefused) {
  W8A8 c;
  c.quant()["ignore"].push_back("model.layers.0.self_attn.q_proj");
  EXPECT_THAT(refusal(c.run()), AllOf(HasSubstr(kQ), HasSubstr("I8")));
}

TEST(W8A8, FloatModuleThatIsTargetedIsRefused) {
  W8A8 c;
  c.quant()["ignore"] = Json::array({"re:.*mlp\\.gate$"});
  EXPECT_THAT(refusal(c.run()), HasSubstr("lm_head.weight"));
  // A router that the list forgets is no linear module to the tools; it stays float.
  c.quant()["ignore"] = Json::array({"lm_head"});
  EXPECT_TRUE(c.run().ok());
}

TEST(W8A8, PatternsAreMatchedFromTheStart) {
  W8A8 c;
  c.group()["targets"] = Json::array({"re:.*self_attn\\..*_proj$", "re:.*mlp\\.experts\\..*"});
  const auto r = c.run();
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_THAT(r->notes, Contains(HasSubstr("'re:.*self_attn\\..*_proj$': 8 modules")));
  c.group()["targets"] = Json::array({"re:self_attn"});
  EXPECT_THAT(refusal(c.run()), HasSubstr("does not target it"));
  c.group()["targets"] = Json::array({"re:("});
  EXPECT_THAT(refusal(c.run()), HasSubstr("'re:('"));
}

TEST(W8A8, HostilePatternsEnd) {
  W8A8 c;
  c.quant()["ignore"].push_back("re:(([a-z0-9._]*)*)*#");
  c.quant()["ignore"].push_back("re:" + std::string(400, '(') + "a" + std::string(400, ')'));
  EXPECT_TRUE(c.run().ok());
}

// Sixteen thousand copies of a state are as many levels of recursion in the matcher.
TEST(W8A8, CountsThatRepeatTooMuchAreRefused) {
  for (const char* p : {"re:(a?){16000}", "re:((a?){1,100}){90}", "re:(?:){24900}", "re:(a?){99999999999999999999}"}) {
    W8A8 c;
    c.quant()["ignore"].push_back(p);
    EXPECT_THAT(refusal(c.run()), AllOf(HasSubstr(p), HasSubstr("repeat too much")));
  }
  W8A8 c;
  c.quant()["ignore"].push_back("re:model\\.layers\\.[0-9]{1,3}\\.mlp\\.gate$");
  EXPECT_TRUE(c.run().ok());
}

TEST(W8A8, ListWithoutMatchesIsReported) {
  W8A8 c;
  c.quant()["ignore"].push_back("language_model.lm_head");
  const auto r = c.run();
  ASSERT_TRUE(r.ok());
  EXPECT_THAT(r->notes, Contains(AllOf(HasSubstr("warning"), HasSubstr("'language_model.lm_head': 0"))));
}

TEST(W8A8, ScalesAreChecked) {
  W8A8 c;
  Tensor& s = c.tensors[std::string(kQ) + "_scale"];
  reinterpret_cast<uint16_t*>(s.data.data())[5] = 0x7fc0;
  EXPECT_THAT(refusal(c.run()), AllOf(HasSubstr(std::string(kQ) + "_scale"), HasSubstr("row 5"), HasSubstr("nan")));
  s = random_bf16({1}, 1);
  EXPECT_THAT(refusal(c.run()), AllOf(HasSubstr(std::string(kQ) + "_scale"), HasSubstr("[128, 1]")));
  c.tensors.erase(std::string(kQ) + "_scale");
  EXPECT_THAT(refusal(c.run()), HasSubstr(std::string(kQ) + "_scale is missing"));
}

TEST(W8A8, ZeroPointsMustBeZero) {
  W8A8 c;
  const std::string name = std::string(kQ) + "_zero_point";
  c.tensors[name] = make_tensor(DType::kI8, {128, 1});
  EXPECT_TRUE(c.run().ok());
  c.tensors[name].data[9] = std::byte(1);
  EXPECT_THAT(refusal(c.run()), HasSubstr(name));
}

TEST(W8A8, WithoutInt8ActivationsItIsWidened) {
  W8A8 c;
  c.group()["input_activations"] = nullptr;
  const auto r = c.run();
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_THAT(report_text(*r), HasSubstr("8 attention tensors: int8 per channel to"));
  const ir::MirDir m = open_mir(c.tmp / "out");
  const TensorView q = m.weight("layers.0.attn.q.weight");
  EXPECT_NE(q.dtype, DType::kI8);
  const auto scale = to_f32_vector(c.tensors[std::string(kQ) + "_scale"].view());
  const auto codes = to_f32_vector(c.tensors[kQ].view()), found = to_f32_vector(q);
  for (size_t i = 0; i < found.size(); ++i) ASSERT_EQ(found[i], codes[i] * scale[i / 128]);
}

TEST(W8A8, OneScaleForAMatrixIsThatOfEveryRow) {
  W8A8 c;
  c.group()["weights"]["strategy"] = "tensor";
  EXPECT_THAT(refusal(c.run()), HasSubstr("one scale for the matrix"));
  for (auto& [name, t] : c.tensors)
    if (name.ends_with("_scale")) t = tensor_f32({1}, std::vector{0.25f});
  const auto r = c.run();
  ASSERT_TRUE(r.ok()) << r.error().message();
  const ir::MirDir m = open_mir(c.tmp / "out");
  EXPECT_EQ(m.weight("layers.0.attn.q.weight").dtype, DType::kI8);
  EXPECT_EQ(to_f32_vector(m.weight("layers.0.attn.q.weight_scale")), std::vector<float>(128, 0.25f));
}

TEST(W8A8, StaticActivationsBecomeDynamicWithANote) {
  W8A8 c;
  c.group()["input_activations"]["dynamic"] = false;
  c.group()["input_activations"]["strategy"] = "tensor";
  c.tensors["model.layers.0.self_attn.q_proj.input_scale"] = tensor_f32({1}, std::vector{0.5f});
  const auto r = c.run();
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_THAT(r->notes, Contains(HasSubstr("int8 tensors were made for static activations")));
}

TEST(W8A8, NamesGoBeforeTheClass) {
  W8A8 c;
  Json named = c.group();
  named["targets"] = Json::array({"model.layers.0.self_attn.q_proj"});
  named["input_activations"] = nullptr;
  c.quant()["config_groups"]["group_1"] = named;
  const auto r = c.run();
  ASSERT_TRUE(r.ok()) << r.error().message();
  const ir::MirDir m = open_mir(c.tmp / "out");
  EXPECT_NE(m.weight("layers.0.attn.q.weight").dtype, DType::kI8);
  EXPECT_EQ(m.weight("layers.0.attn.k.weight").dtype, DType::kI8);
}

TEST(W8A8, OtherSchemesAreNotSupportedYet) {
  const std::vector<std::pair<std::string, std::function<void(W8A8&)>>> cases = {
      {"strategy \"attn_head\"", [](W8A8& c) { c.group()["weights"]["strategy"] = "attn_head"; }},
      {"dynamic true", [](W8A8& c) { c.group()["weights"]["dynamic"] = true; }},
      {"num_bits 4", [](W8A8& c) { c.group()["weights"]["num_bits"] = 4; }},
      {"marlin-24", [](W8A8& c) { c.group()["format"] = "marlin-24"; }},
      {"output_activations",
       [](W8A8& c) {
         c.group()["output_activations"] = {{"num_bits", 8}};
       }},
      {"transform_config",
       [](W8A8& c) {
         c.quant()["transform_config"] = {{"config_groups", {{"R1", 1}}}};
       }},
      {"sparsity_config",
       [](W8A8& c) {
         c.quant()["sparsity_config"] = {{"format", "sparse-bitmask"}};
       }},
      {"'bitsandbytes'",
       [](W8A8& c) {
         c.config["quantization_config"] = {{"quant_method", "bitsandbytes"}};
       }},
  };
  for (const auto& [word, change] : cases) {
    W8A8 c;
    change(c);
    EXPECT_THAT(refusal(c.run()), AllOf(HasSubstr(word), HasSubstr("not supported yet")));
  }
}

TEST(W8A8, AFormatThatIsNotTheTensorsIsRefused) {
  W8A8 c;
  c.group()["format"] = "float-quantized";
  c.group()["weights"]["type"] = "float";
  EXPECT_THAT(refusal(c.run()), AllOf(HasSubstr("is I8, expected F8_E4M3"), HasSubstr("fp8 per channel")));
  c.config["quantization_config"] = {{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 32}};
  EXPECT_THAT(refusal(c.run()), HasSubstr("is I8, expected I32"));
}

}  // namespace
}  // namespace mi::model
