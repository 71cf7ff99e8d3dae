// The arithmetic of each format on small matrices that are packed here by the rule of its header, one number at a time.

#include <gmock/gmock.h>

#include <cmath>

#include "model/formats/codes.h"
#include "model/formats/stored.h"
#include "model/testing.h"

namespace mi::model::formats {
namespace {

using namespace mi::model::testing;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <typename M>
std::vector<float> all_rows(const M& m) {
  std::vector<float> out(size_t(m.rows * m.cols));
  dequantize_rows(m, 0, m.rows, out.data());
  // Any row alone gives the same numbers.
  for (int64_t r = 0; r < m.rows; ++r) {
    std::vector<float> one(size_t(m.cols), -99.0f);
    dequantize_rows(m, r, 1, one.data());
    EXPECT_TRUE(std::equal(one.begin(), one.end(), out.begin() + r * m.cols)) << r;
  }
  return out;
}

std::vector<std::byte> bytes_of(const std::vector<int>& v) {
  std::vector<std::byte> out;
  for (int b : v) out.push_back(std::byte(b & 255));
  return out;
}

// value(i) in `bits` bits, the first lowest, into 32-bit words.
std::vector<std::byte> pack(int bits, int64_t count, const std::function<uint32_t(int64_t)>& value) {
  std::vector<uint32_t> words(size_t((count * bits + 31) / 32));
  for (int64_t i = 0; i < count; ++i) words[size_t(i * bits / 32)] |= value(i) << (i * bits % 32);
  std::vector<std::byte> out(words.size() * 4);
  std::memcpy(out.data(), words.data(), out.size());
  return out;
}
void append(std::vector<std::byte>* to, const std::vector<std::byte>& more) {
  to->insert(to->end(), more.begin(), more.end());
}
// Some number below `below`, different for neighbours.
uint32_t some(int64_t a, int64_t b, uint32_t below) { return uint32_t(a * 7 + b * 5 + a * b) % below; }

TEST(Codes, E4M3) {
  EXPECT_EQ(kE4M3[0x00], 0.0f);
  EXPECT_EQ(kE4M3[0x01], 0.001953125f);  // 2^-9
  EXPECT_EQ(kE4M3[0x07], 7 * 0.001953125f);
  EXPECT_EQ(kE4M3[0x08], 0.015625f);  // 2^-6
  EXPECT_EQ(kE4M3[0x38], 1.0f);
  EXPECT_EQ(kE4M3[0x3c], 1.5f);
  EXPECT_EQ(kE4M3[0xc0], -2.0f);
  EXPECT_EQ(kE4M3[0x7e], 448.0f);
  EXPECT_TRUE(std::signbit(kE4M3[0x80]));
  EXPECT_TRUE(std::isnan(kE4M3[0x7f]) && std::isnan(kE4M3[0xff]));
}

TEST(Codes, E8M0) {
  EXPECT_EQ(e8m0_value(127), 1.0f);
  EXPECT_EQ(e8m0_value(130), 8.0f);
  EXPECT_EQ(e8m0_value(254), 0x1p127f);
  EXPECT_EQ(e8m0_value(1), 0x1p-126f);
  EXPECT_EQ(e8m0_value(0), 0x1p-127f);
  EXPECT_TRUE(std::isnan(e8m0_value(255)));
}

TEST(ScaledCodesTest, Int8PerChannelWithZero) {
  const auto codes = bytes_of({-128, 0, 127, 10, 20, 30});
  const std::vector<float> scale = {0.5f, 2.0f}, zero = {0.0f, 4.0f};
  EXPECT_THAT(all_rows(ScaledCodes{ScaledCodes::Kind::kInt8, codes.data(), 2, 3, 1, 3, scale, zero}),
              ElementsAre(-64.0f, 0.0f, 63.5f, 12.0f, 32.0f, 52.0f));
}

// Blocks of the size that is given, whatever the grid looks like: 3 x 5 in blocks of 2 x 2 is cut at both edges.
TEST(ScaledCodesTest, BlocksAreCutAtTheEdges) {
  std::vector<std::byte> codes(15, std::byte(0x38));  // 1.0
  codes[14] = std::byte(0xc0);                        // -2.0
  const std::vector<float> scale = {1, 2, 3, 4, 5, 6};
  EXPECT_THAT(all_rows(ScaledCodes{ScaledCodes::Kind::kE4M3, codes.data(), 3, 5, 2, 2, scale, {}}),
              ElementsAre(1, 1, 2, 2, 3, 1, 1, 2, 2, 3, 4, 4, 5, 5, -12));
}

TEST(PackedIntTest, ZerosArePackedAlongTheRows) {
  for (const int bits : {4, 8}) {
    const int64_t rows = 10, cols = 11, groups = 3;
    const uint32_t top = 1u << bits;
    std::vector<std::byte> words, zeros;
    for (int64_t r = 0; r < rows; ++r) append(&words, pack(bits, cols, [&](int64_t c) { return some(r, c, top); }));
    // [words of rows, groups]
    const int64_t per_word = 32 / bits;
    for (int64_t w = 0; w * per_word < rows; ++w)
      for (int64_t g = 0; g < groups; ++g)
        append(&zeros, pack(bits, per_word, [&](int64_t i) { return some(w * per_word + i, g + 3, top); }));
    std::vector<float> scale;
    for (int i = 0; i < rows * groups; ++i) scale.push_back(float(i + 1) / 16);
    std::vector<int32_t> group_of = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2};
    for (int round = 0; round < 3; ++round) {
      if (round == 1) std::reverse(group_of.begin(), group_of.end());  // weight_g_idx
      const bool asymmetric = round < 2;
      const auto w = all_rows(
          PackedInt{bits, words.data(), rows, cols, groups, scale, asymmetric ? zeros.data() : nullptr, group_of});
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < cols; ++c) {
          const int64_t g = group_of[size_t(c)];
          const int zero = asymmetric ? int(some(r, g + 3, top)) : int(top / 2);
          ASSERT_EQ(w[size_t(r * cols + c)], float(int(some(r, c, top)) - zero) * scale[size_t(r * groups + g)])
              << bits << " " << r << " " << c;
        }
    }
  }
}

TEST(Fp4Test, LowNibbleFirst) {
  // codes 1 2 | 7 8 | 15 0, groups of 2
  const auto nibbles = bytes_of({0x21, 0x87, 0x0f});
  const std::vector<float> scale = {2, 0.5f, 4};
  EXPECT_THAT(all_rows(Fp4{nibbles.data(), 1, 6, 2, scale}), ElementsAre(1.0f, 2.0f, 3.0f, 0.0f, -24.0f, 0.0f));
}

TEST(GptqTest, PackedAlongTheInputsZerosAlongTheOutputs) {
  for (const int bits : {2, 4, 8}) {
    const int64_t per_word = 32 / bits, rows = 2 * per_word, cols = 3 * per_word, groups = 3;
    const uint32_t top = 1u << bits;
    std::vector<std::byte> qweight(size_t(cols / per_word * rows * 4)), qzeros;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t w = 0; w < cols / per_word; ++w) {
        const auto word = pack(bits, per_word, [&](int64_t i) { return some(r, w * per_word + i, top); });
        std::memcpy(qweight.data() + (w * rows + r) * 4, word.data(), 4);
      }
    for (int64_t g = 0; g < groups; ++g)
      append(&qzeros, pack(bits, rows, [&](int64_t r) { return some(r, g + 3, top); }));
    std::vector<float> scale;
    for (int i = 0; i < rows * groups; ++i) scale.push_back(float(i + 1) / 16);
    std::vector<int32_t> group_of;
    for (int64_t c = 0; c < cols; ++c) group_of.push_back(int32_t((c * 5) % groups));  // desc_act
    for (const int offset : {0, 1}) {
      const auto w = all_rows(Gptq{bits, qweight.data(), qzeros.data(), offset, rows, cols, scale, group_of});
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < cols; ++c) {
          const int64_t g = group_of[size_t(c)];
          ASSERT_EQ(w[size_t(r * cols + c)],
                    float(int(some(r, c, top)) - int(some(r, g + 3, top)) - offset) * scale[size_t(g * rows + r)]);
        }
    }
  }
}

TEST(AwqTest, OutputsAreInTheOrderOfTheKernel) {
  const int64_t rows = 16, cols = 5, group = 2, groups = 3;
  const int order[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  std::vector<std::byte> qweight, qzeros;
  for (int64_t c = 0; c < cols; ++c)
    append(&qweight, pack(4, rows, [&](int64_t i) { return some(i / 8 * 8 + order[i % 8], c, 16); }));
  for (int64_t g = 0; g < groups; ++g)
    append(&qzeros, pack(4, rows, [&](int64_t i) { return some(i / 8 * 8 + order[i % 8], g + 3, 16); }));
  std::vector<float> scale;
  for (int i = 0; i < rows * groups; ++i) scale.push_back(float(i + 1) / 16);
  const auto w = all_rows(Awq{qweight.data(), qzeros.data(), rows, cols, group, scale});
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c)
      ASSERT_EQ(w[size_t(r * cols + c)],
                float(int(some(r, c, 16)) - int(some(r, c / group + 3, 16))) * scale[size_t(c / group * rows + r)]);
}

// A checkpoint of Tiny with the q projection of its layer stored in another way.
struct Changed {
  static constexpr const char* kModule = "model.layers.0.self_attn.q_proj";
  TempDir tmp;
  Json config;
  TensorMap tensors;
  explicit Changed(Json quantization) {
    const Tiny tiny;
    config = tiny.config();
    config["quantization_config"] = std::move(quantization);
    tensors = tiny.tensors();
    tensors.erase(name("weight"));
  }
  static std::string name(const std::string& tail) { return std::string(kModule) + "." + tail; }
  Tensor& put(const std::string& tail, DType t, Shape shape, int fill = 0) {
    Tensor x = make_tensor(t, std::move(shape));
    std::fill(x.data.begin(), x.data.end(), std::byte(fill));
    return tensors[name(tail)] = std::move(x);
  }
  void put_f32(const std::string& tail, Shape shape, float value) {
    const std::vector<float> v(size_t(*shape_count(shape)), value);
    tensors[name(tail)] = tensor_f32(std::move(shape), v);
  }
  void put_ints(const std::string& tail, const std::vector<int32_t>& v) {
    Tensor t = make_tensor(DType::kI32, {int64_t(v.size())});
    std::memcpy(t.data.data(), v.data(), t.data.size());
    tensors[name(tail)] = std::move(t);
  }
  Result<ExportReport> run() {
    write_checkpoint(tmp / "m", config, tensors);
    return export_to(tmp / "m", tmp / "out", [](ExportOptions& o) { o.force = true; });
  }
  // The weight in the MIR, in float; empty with a failure otherwise.
  std::vector<float> weight(DType* dtype = nullptr) {
    const auto r = run();
    EXPECT_TRUE(r.ok()) << r.error().message();
    if (!r.ok()) return {};
    const ir::MirDir m = open_mir(tmp / "out");
    const TensorView v = m.weight("layers.0.attn.q.weight");
    if (dtype) *dtype = v.dtype;
    return to_f32_vector(v);
  }
  std::string refused() { return refusal(run()); }
};

Json ct(const std::string& format, Json weights) {
  return Json{
      {"quant_method", "compressed-tensors"},
      {"format", format},
      {"ignore", Json::array()},
      {"config_groups",
       {{"g", {{"targets", Json::array({Changed::kModule})}, {"weights", weights}, {"input_activations", nullptr}}}}}};
}
Json int4_groups(bool symmetric) {
  return Json{{"num_bits", 4}, {"type", "int"}, {"strategy", "group"}, {"group_size", 16}, {"symmetric", symmetric}};
}
Json gptq(Json more) {
  Json j{{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 16}, {"desc_act", false}, {"sym", true}};
  j.update(more);
  return j;
}

struct PackedFour : Changed {
  explicit PackedFour(Json q = ct("pack-quantized", int4_groups(true))) : Changed(std::move(q)) {
    put("weight_packed", DType::kI32, {32, 4}, 0x99);  // every number is 9 - 8
    put_f32("weight_scale", {32, 2}, 0.75f);
    put_ints("weight_shape", {32, 32});
  }
};

TEST(Storage, NumbersGetTheNarrowestExactType) {
  DType dtype = DType::kF32;
  PackedFour c;
  EXPECT_THAT(c.weight(&dtype), ::testing::Each(0.75f));
  EXPECT_EQ(dtype, DType::kBF16);
  c.put_f32("weight_scale", {32, 2}, 1.0009765625f);  // 1 + 2^-10
  EXPECT_THAT(c.weight(&dtype), ::testing::Each(1.0009765625f));
  EXPECT_EQ(dtype, DType::kF16);
  c.put_f32("weight_scale", {32, 2}, 0.1f);
  EXPECT_THAT(c.weight(&dtype), ::testing::Each(0.1f));
  EXPECT_EQ(dtype, DType::kF32);
}

TEST(Storage, LayersOfOneFormShareAType) {
  PackedFour c;
  const Tiny two{.layers = 2};
  c.config["num_hidden_layers"] = 2;
  for (auto& [name, t] : two.tensors())
    if (name.starts_with("model.layers.1.")) c.tensors[name] = t;
  c.config["quantization_config"]["config_groups"]["g"]["targets"] = Json::array({"re:.*q_proj"});
  const std::string other = "model.layers.1.self_attn.q_proj.";
  c.tensors.erase(other + "weight");
  for (const char* tail : {"weight_packed", "weight_shape", "weight_scale"})
    c.tensors[other + tail] = c.tensors[Changed::name(tail)];
  c.put_f32("weight_scale", {32, 2}, 0.1f);
  const auto r = c.run();
  ASSERT_TRUE(r.ok()) << r.error().message();
  const ir::MirDir m = open_mir(c.tmp / "out");
  EXPECT_EQ(m.graph.blocks.size(), 1u);
  EXPECT_THAT(to_f32_vector(m.weight("layers.0.attn.q.weight")), ::testing::Each(0.1f));
  EXPECT_THAT(to_f32_vector(m.weight("layers.1.attn.q.weight")), ::testing::Each(0.75f));
  ASSERT_EQ(r->dequantized.size(), 1u);
  EXPECT_EQ(r->dequantized[0].tensors, 2);
  EXPECT_THAT(report_text(*r), HasSubstr("2 attention tensors: packed int4 in groups of 16 to F32"));
}

TEST(Storage, PackedIntegersAreChecked) {
  PackedFour c;
  c.put_ints("weight_shape", {32, 33});
  EXPECT_THAT(c.refused(), AllOf(HasSubstr("weight_packed has shape [32, 4], expected [32, 5]")));
  c.put_ints("weight_shape", {32, -8});
  EXPECT_THAT(c.refused(), AllOf(HasSubstr("weight_shape"), HasSubstr("-8")));
  c.put_ints("weight_shape", {32, 32});
  c.put_f32("weight_scale", {32, 3}, 1);
  EXPECT_THAT(c.refused(), HasSubstr("weight_scale has shape [32, 3], expected [32, 2]"));
  // Two groups of 17 would be two columns of scales, too.
  Json& group = c.config["quantization_config"]["config_groups"]["g"]["weights"]["group_size"];
  group = 17;
  c.put_f32("weight_scale", {32, 2}, 1);
  EXPECT_THAT(c.refused(), AllOf(HasSubstr("32 inputs, no multiple of the group of 17"), HasSubstr("correct it")));
  group = 16;
  c.put_f32("weight_scale", {32, 2}, INFINITY);
  EXPECT_THAT(c.refused(), AllOf(HasSubstr("weight_scale"), HasSubstr("scale 0 of 64 is NaN or infinite")));
  c.tensors.erase(Changed::name("weight_shape"));
  EXPECT_THAT(c.refused(), HasSubstr("weight_shape is missing"));
}

TEST(Storage, AsymmetricIntegersNeedTheirZeros) {
  PackedFour c(ct("pack-quantized", int4_groups(false)));
  EXPECT_THAT(c.refused(), HasSubstr("weight_zero_point is missing"));
  c.put("weight_zero_point", DType::kI32, {4, 2}, 0x22);
  EXPECT_THAT(c.weight(), ::testing::Each(7 * 0.75f));
  c.put("weight_zero_point", DType::kI32, {32, 2});
  EXPECT_THAT(c.refused(), HasSubstr("weight_zero_point has shape [32, 2], expected [4, 2]"));
}

TEST(Storage, GroupIndexIsNeededAndChecked) {
  Json w = int4_groups(true);
  w["actorder"] = "group";
  PackedFour c(ct("pack-quantized", w));
  EXPECT_THAT(c.refused(), HasSubstr("weight_g_idx is missing"));
  std::vector<int32_t> index(32, 1);
  c.put_ints("weight_g_idx", index);
  EXPECT_THAT(c.weight(), ::testing::Each(0.75f));
  index[7] = -1;
  c.put_ints("weight_g_idx", index);
  EXPECT_THAT(c.refused(), AllOf(HasSubstr("weight_g_idx"), HasSubstr("input 7 belongs to group -1")));
}

TEST(Storage, NvFp4NeedsAUsefulFactor) {
  Changed c(ct("nvfp4-pack-quantized", {{"num_bits", 4}, {"type", "float"}, {"group_size", 16}}));
  c.put("weight_packed", DType::kU8, {32, 16}, 0x22);    // 1
  c.put("weight_scale", DType::kF8E4M3, {32, 2}, 0x38);  // 1
  c.put_f32("weight_global_scale", {1}, 4);
  EXPECT_THAT(c.weight(), ::testing::Each(0.25f));
  c.put_f32("weight_global_scale", {1}, 0);
  EXPECT_THAT(c.refused(), AllOf(HasSubstr("weight_global_scale"), HasSubstr("no factor")));
  c.put_f32("weight_global_scale", {1}, 4);
  c.put("weight_scale", DType::kF8E4M3, {32, 2}, 0x7f);
  EXPECT_THAT(c.refused(), AllOf(HasSubstr("weight_scale"), HasSubstr("NaN")));
}

TEST(Storage, ModelOptSaysItInAFileOfItsOwn) {
  Changed c(Json::object());
  c.config.erase("quantization_config");
  c.put("weight", DType::kU8, {32, 16}, 0x22);
  c.put("weight_scale", DType::kF8E4M3, {32, 2}, 0x38);
  c.put_f32("weight_scale_2", {}, 4);
  c.put_f32("input_scale", {}, 1);
  EXPECT_THAT(c.refused(), HasSubstr("no quantization_config"));
  write_text(c.tmp / "m" / "hf_quant_config.json", R"({"producer": {}, "quantization": {"quant_algo": "NVFP4"}})");
  EXPECT_THAT(c.weight(), ::testing::Each(4.0f));
  write_text(c.tmp / "m" / "hf_quant_config.json", R"({"producer": {}, "quantization": {"quant_algo": "W4A8_AWQ"}})");
  EXPECT_THAT(c.refused(), AllOf(HasSubstr("hf_quant_config.json"), HasSubstr("W4A8_AWQ")));
}

TEST(Storage, Fp8PerTensor) {
  Changed c(Json{{"quant_method", "fp8"}, {"activation_scheme", "static"}});
  c.put("weight", DType::kF8E4M3, {32, 32}, 0x40);  // 2
  c.put_f32("weight_scale", {1}, 3);
  c.put_f32("input_scale", {1}, 1);
  EXPECT_THAT(c.weight(), ::testing::Each(6.0f));
}

struct Gptq4 : Changed {
  explicit Gptq4(Json q = gptq(Json::object())) : Changed(std::move(q)) {
    put("qweight", DType::kI32, {4, 32}, 0x99);
    put("qzeros", DType::kI32, {2, 4}, 0x77);
    put("scales", DType::kF16, {2, 32});
    for (size_t i = 0; i < 64; ++i) tensors[name("scales")].data[2 * i + 1] = std::byte(0x3c);  // 1
  }
};

TEST(Storage, GptqVersionsDifferInTheirZero) {
  EXPECT_THAT(Gptq4().weight(), ::testing::Each(1.0f));
  EXPECT_THAT(Gptq4(gptq({{"checkpoint_format", "gptq_v2"}})).weight(), ::testing::Each(2.0f));
  EXPECT_THAT(Gptq4(gptq({{"checkpoint_format", "marlin"}})).refused(), HasSubstr("marlin"));
  EXPECT_THAT(Gptq4(gptq({{"bits", 3}})).refused(), AllOf(HasSubstr("bits 3"), HasSubstr("not supported yet")));
}

TEST(Storage, GptqModulesMayHaveBitsOfTheirOwn) {
  Gptq4 c(gptq({{"bits", 8}, {"group_size", 32}, {"dynamic", {{"+:.*q_proj", {{"bits", 4}, {"group_size", 16}}}}}}));
  EXPECT_THAT(c.weight(), ::testing::Each(1.0f));
  c.config["quantization_config"].erase("dynamic");
  EXPECT_THAT(c.refused(), HasSubstr("scales has shape [2, 32], expected [1, 32]"));
  c.config["quantization_config"]["dynamic"] = {{"-:.*q_proj", Json::object()}};
  EXPECT_THAT(c.refused(), HasSubstr("does not target it"));
}

TEST(Storage, GptqIsChecked) {
  Gptq4 c(gptq({{"desc_act", true}}));
  EXPECT_THAT(c.refused(), HasSubstr("g_idx is missing"));
  c.put_ints("g_idx", std::vector<int32_t>(32, 0));
  EXPECT_THAT(c.weight(), ::testing::Each(1.0f));
  c.put_ints("g_idx", std::vector<int32_t>(32, 2));
  EXPECT_THAT(c.refused(), AllOf(HasSubstr("g_idx"), HasSubstr("only 2 groups")));
  c.put_ints("g_idx", std::vector<int32_t>(31, 0));
  EXPECT_THAT(c.refused(), HasSubstr("g_idx has shape [31]"));
  c.tensors.erase(Changed::name("qzeros"));
  EXPECT_THAT(c.refused(), HasSubstr("qzeros is missing"));
}

TEST(Storage, AwqOfOtherKernelsIsRefused) {
  const Json q{{"quant_method", "awq"}, {"bits", 4}, {"group_size", 16}, {"version", "gemv"}};
  EXPECT_THAT(Changed(q).refused(), AllOf(HasSubstr("version"), HasSubstr("gemv")));
}

// Tensors of any shapes and types: either an error, or numbers that lie inside them (a sanitizer would tell).
TEST(Storage, WhateverTheShapesNothingOutsideIsRead) {
  const std::vector<Format> formats = {
      {.layout = Layout::kInt8, .strategy = Strategy::kChannel, .symmetric = false},
      {.layout = Layout::kFloat8, .strategy = Strategy::kBlock, .block_rows = 2, .block_cols = 3},
      {.layout = Layout::kFloat8, .strategy = Strategy::kTensor},
      {.layout = Layout::kPackedInt, .bits = 4, .strategy = Strategy::kGroup, .group = 2, .symmetric = false},
      {.layout = Layout::kPackedInt, .bits = 8, .strategy = Strategy::kTensor},
      {.layout = Layout::kNvFp4, .bits = 4, .strategy = Strategy::kGroup, .group = 16},
      {.layout = Layout::kMxFp4Blocks, .bits = 4, .strategy = Strategy::kGroup, .group = 32},
      {.layout = Layout::kGptq, .bits = 8, .strategy = Strategy::kGroup, .group = 4, .zero_minus_one = true},
      {.layout = Layout::kAwq, .bits = 4, .strategy = Strategy::kGroup, .group = 2},
  };
  const DType types[] = {DType::kI8, DType::kF8E4M3, DType::kI32, DType::kU8, DType::kF32, DType::kI64};
  const char* const tails[] = {
      "weight", "weight_packed", "qweight", "blocks",       "weight_scale",       "weight_zero_point",
      "scales", "qzeros",        "g_idx",   "weight_shape", "weight_global_scale"};
  int read = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    uint64_t state = seed;
    const auto pick = [&](int64_t n) { return int64_t(seed_of(++state, "shape") % uint64_t(n)); };
    const Format& f = formats[size_t(pick(int64_t(formats.size())))];
    const int64_t out = 8 * (1 + pick(2)), in = 8 * (1 + pick(2));
    // Mostly what fits, sometimes not.
    const auto size = [&](int64_t right) { return pick(12) == 0 ? 1 + pick(9) : right; };
    const auto type = [&](DType right) { return pick(20) == 0 ? types[pick(6)] : right; };
    TensorMap t;
    const auto put = [&](const std::string& tail, DType d, Shape shape) {
      for (int64_t& n : shape) n = size(n);
      if (pick(25) == 0) shape.push_back(1);
      Tensor x = make_tensor(type(d), shape);
      for (size_t i = 0; i < x.data.size(); ++i) x.data[i] = std::byte(x.dtype == DType::kF32 ? 0 : pick(3));
      t["m." + tail] = std::move(x);
    };
    std::string main = "weight";
    if (f.layout == Layout::kInt8 || f.layout == Layout::kFloat8) {
      put("weight", f.layout == Layout::kInt8 ? DType::kI8 : DType::kF8E4M3, {out, in});
      const bool block = f.strategy == Strategy::kBlock, one = f.strategy == Strategy::kTensor;
      const Shape grid = {one ? 1 : block ? (out + 1) / 2 : out, block ? (in + 2) / 3 : 1};
      put("weight_scale", DType::kF32, grid);
      if (!f.symmetric) put("weight_zero_point", DType::kI8, grid);
    } else if (f.layout == Layout::kPackedInt) {
      main = "weight_packed";
      const int64_t groups = f.group > 0 ? in / f.group : 1;
      put(main, DType::kI32, {out, (in * f.bits + 31) / 32});
      put("weight_scale", DType::kF32, f.group > 0 ? Shape{out, groups} : Shape{1});
      if (!f.symmetric) put("weight_zero_point", DType::kI32, {(out * f.bits + 31) / 32, groups});
      Tensor shape = make_tensor(DType::kI64, {2});
      const int64_t said[2] = {size(out), size(in)};
      std::memcpy(shape.data.data(), said, 16);
      t["m.weight_shape"] = std::move(shape);
    } else if (f.layout == Layout::kNvFp4) {
      main = "weight_packed";
      put(main, DType::kU8, {out, 16});
      put("weight_scale", DType::kF8E4M3, {out, 2});
      t["m.weight_global_scale"] = tensor_f32({1}, std::vector{2.0f});
    } else if (f.layout == Layout::kMxFp4Blocks) {
      main = "w_blocks";
      put(main, DType::kU8, {2, out, 1, 16});
      put("w_scales", DType::kU8, {2, out, 1});
    } else {
      main = "qweight";
      const bool awq = f.layout == Layout::kAwq;
      const int64_t groups = in / f.group;
      put(main, DType::kI32, awq ? Shape{in, out / 8} : Shape{in / 4, out});
      put("scales", DType::kF32, {groups, out});
      put("qzeros", DType::kI32, {groups, awq ? out / 8 : out / 4});
      if (pick(2) == 0) put("g_idx", DType::kI32, {in});
      if (const auto it = t.find("m.g_idx"); it != t.end() && pick(3) > 0)
        std::fill(it->second.data.begin(), it->second.data.end(), std::byte(0));
    }
    if (pick(20) == 0) t.erase("m." + std::string(tails[pick(int64_t(std::size(tails)))]));
    if (!t.count("m." + main)) continue;
    TempDir tmp;
    write_checkpoint(tmp / "c", Json::object(), t);
    const auto k = Checkpoint::open(tmp / "c");
    ASSERT_TRUE(k.ok());
    const auto s = find_stored(*k, *k->find("m." + main), f);
    if (!s.ok()) {
      EXPECT_THAT(s.error().message(), HasSubstr("m."));
      continue;
    }
    const auto opened = open_stored(*s);
    if (!opened.ok()) continue;
    std::vector<float> w(size_t(s->rows() * s->cols()));
    (*opened)->rows(0, s->rows(), w.data());
    ++read;
  }
  EXPECT_GT(read, 80);
}

TEST(Storage, TwoFormsOfOneWeightAreRefused) {
  PackedFour c;
  c.tensors[Changed::name("weight")] = random_bf16({32, 32}, 1);
  EXPECT_THAT(c.refused(), HasSubstr("same weight under two names"));
}

TEST(Storage, ScalesOfACacheAreSkipped) {
  PackedFour c;
  c.put_f32("k_scale", {1}, 1);
  c.config["quantization_config"]["kv_cache_scheme"] = {{"num_bits", 8}, {"type", "float"}};
  const auto r = c.run();
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_THAT(r->notes, Contains(HasSubstr("kv_cache_scheme is not followed")));
  ASSERT_EQ(r->skipped.size(), 1u);
}

TEST(Storage, NamesOfPackedTensors) {
  EXPECT_EQ(weight_name("a.q_proj.weight_packed"), "a.q_proj.weight");
  EXPECT_EQ(weight_name("a.q_proj.qweight"), "a.q_proj.weight");
  EXPECT_EQ(weight_name("a.experts.down_proj_blocks"), "a.experts.down_proj");
  EXPECT_EQ(weight_name("a.norm.weight"), "a.norm.weight");
  EXPECT_EQ(module_name("a.q_proj.qweight"), "a.q_proj");
  EXPECT_EQ(module_name("a.experts.down_proj_blocks"), "a.experts.down_proj");
}

}  // namespace
}  // namespace mi::model::formats
