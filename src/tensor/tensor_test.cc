#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>

#include "base/sanitized.h"
#include "base/temp_dir.h"
#include "tensor/dtype.h"
#include "tensor/finite.h"
#include "tensor/op_fields.h"
#include "tensor/safetensors.h"

namespace mi {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

TEST(DTypeTest, NamesRoundTrip) {
  for (int i = 0; i <= int(DType::kBool); ++i) EXPECT_EQ(dtype_from_name(dtype_name(DType(i))), DType(i));
  EXPECT_FALSE(dtype_from_name("F12"));
  EXPECT_FALSE(dtype_from_name("f32"));
}

TEST(DTypeTest, EveryHalfRoundTripsThroughFloat) {
  for (uint32_t b = 0; b < 65536; ++b) {
    const float f = to_f32(F16{uint16_t(b)});
    if (std::isnan(f)) continue;
    EXPECT_EQ(to_f16(f).bits, b);
    const float g = to_f32(BF16{uint16_t(b)});
    if (!std::isnan(g)) {
      EXPECT_EQ(to_bf16(g).bits, b);
    }
  }
  EXPECT_TRUE(std::isnan(to_f32(to_bf16(NAN))));
  EXPECT_TRUE(std::isnan(to_f32(to_f16(NAN))));
  EXPECT_TRUE(std::isinf(to_f32(to_f16(1e6f))));
}

TEST(DTypeTest, RoundsTiesToEven) {
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x3f808000u)).bits, 0x3f80);     // half way, even below
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x3f818000u)).bits, 0x3f82);     // half way, even above
  EXPECT_EQ(to_f16(1.0f + 0x1p-11f).bits, 0x3c00);
  EXPECT_EQ(to_f16(1.0f + 3 * 0x1p-11f).bits, 0x3c02);
  EXPECT_EQ(to_f16(65519.0f).bits, 0x7bff);
  EXPECT_EQ(to_f16(65520.0f).bits, 0x7c00);
}

TEST(ShapeTest, CountsWithoutOverflow) {
  EXPECT_EQ(shape_count({}), 1);
  EXPECT_EQ(shape_count({3, 4}), 12);
  EXPECT_EQ(shape_count({3, 0, int64_t(1) << 62}), 0);
  EXPECT_FALSE(shape_count({int64_t(1) << 32, int64_t(1) << 32}));
  EXPECT_FALSE(shape_count({-1}));
  EXPECT_EQ(shape_text({32, 64}), "[32, 64]");
}

TEST(OpFieldsTest, TextAndJsonRoundTrip) {
  for (size_t i = 0; i < std::variant_size_v<OpParams>; ++i) {
    const OpParams p = default_params(Op(i));
    EXPECT_EQ(p.index(), i);
    EXPECT_EQ(params_text(p), "");
    EXPECT_EQ(*params_from_json(Op(i), params_json(p), "x"), p);
    EXPECT_EQ(op_from_name(op_name(Op(i))), Op(i));
  }
  RouteParams r;
  r.experts = 128;
  r.k = 4;
  r.score = RouteScore::kSigmoid;
  r.renorm = true;
  r.renorm_eps = 1e-20f;
  r.scale = 2.0f;
  const OpParams p = r;
  EXPECT_EQ(params_text(p), "experts=128 k=4 score=sigmoid renorm=true renorm_eps=1e-20 scale=2");
  EXPECT_EQ(*params_from_json(Op::kRoute, params_json(p), "x"), p);
  EXPECT_EQ(*params_from_text(Op::kRoute, {{"experts", "128"}, {"k", "4"}, {"score", "sigmoid"}, {"renorm", "true"}, {"renorm_eps", "1e-20"}, {"scale", "2"}}, "x"), p);
}

TEST(OpFieldsTest, RefusesByName) {
  EXPECT_THAT(params_from_text(Op::kRoute, {{"expert", "1"}}, "x").error().message(), HasSubstr("did you mean 'experts'"));
  EXPECT_THAT(params_from_text(Op::kRoute, {{"score", "softmin"}}, "x").error().message(), HasSubstr("softmax, sigmoid, none"));
  EXPECT_THAT(params_from_text(Op::kRmsNorm, {{"eps", "inf"}}, "x").error().message(), HasSubstr("finite"));
  EXPECT_FALSE(params_from_text(Op::kRmsNorm, {{"eps", "1"}, {"eps", "2"}}, "x").ok());
  EXPECT_FALSE(params_from_json(Op::kRmsNorm, Json{{"groups", 1.5}}, "x").ok());
  EXPECT_FALSE(params_from_json(Op::kRmsNorm, Json{{"eps", 1e300}}, "x").ok());
}

TEST(OpFieldsTest, JsonFloatsPrintShort) { EXPECT_EQ(params_json(NormParams{1e-5f, false, 1}).dump(), R"({"eps":1e-05})"); }

TEST(FiniteTest, TheFirstNumberThatIsNoneAndItsPlace) {
  const float nan = std::nanf(""), infinity = -std::numeric_limits<float>::infinity();
  for (const DType t : {DType::kF32, DType::kBF16, DType::kF16})
    for (const float bad : {nan, infinity})
      for (const int64_t at : {0, 4095, 4096, 5001}) {
        std::vector<std::byte> raw(5002 * dtype_bytes(t));
        EXPECT_EQ(first_not_finite(raw.data(), t, 5002), -1);
        for (const int64_t i : {at, int64_t(5001)}) {
          const BF16 b = to_bf16(bad);
          const F16 h = to_f16(bad);
          const void* from = t == DType::kF32 ? static_cast<const void*>(&bad) : t == DType::kBF16 ? static_cast<const void*>(&b) : &h;
          std::memcpy(raw.data() + i * int64_t(dtype_bytes(t)), from, dtype_bytes(t));
        }
        EXPECT_EQ(first_not_finite(raw.data(), t, 5002), at);
        EXPECT_EQ(first_not_finite(raw.data(), t, at), -1);
        const TensorView v{t, {2, 61, 41}, raw.data(), raw.size()};
        EXPECT_EQ(not_finite_text(v, at), fmt::format("{} (expert {}, row {}, column {})", std::isnan(bad) ? "a NaN" : "an infinity",
                                                       at / 2501, at % 2501 / 41, at % 41));
      }
  std::vector<std::byte> bytes(8, std::byte{0xff});
  EXPECT_EQ(first_not_finite(bytes.data(), DType::kI8, 8), -1);
  EXPECT_EQ(not_finite_text({DType::kF32, {2}, bytes.data(), 8}, 1), "a NaN (element 1)");
  EXPECT_EQ(not_finite_text({DType::kF32, {2, 1}, bytes.data(), 8}, 1), "a NaN (row 1, column 0)");
}

TEST(OpFieldsTest, FloatsKeepTheirBits) {
  for (float f : {1e-6f, 1.0f / 3, 1.702f, 5e6f, -0.0f, 1e-45f, 3.4028235e38f}) {
    const auto p = params_from_text(Op::kScale, {{"factor", float_text(f)}}, "x");
    EXPECT_EQ(std::bit_cast<uint32_t>(std::get<ScaleParams>(*p).factor), std::bit_cast<uint32_t>(f));
    const Json j = Json::parse(params_json(*p).dump());
    EXPECT_EQ(std::bit_cast<uint32_t>(std::get<ScaleParams>(*params_from_json(Op::kScale, j, "x")).factor), std::bit_cast<uint32_t>(f));
  }
}

// ---- safetensors -------------------------------------------------------------------------------------------------------
std::string refusal(const std::string& header, uint64_t bytes) {
  const auto r = Safetensors::parse_header(header, bytes, "m.safetensors", nullptr);
  return r.ok() ? "accepted" : r.error().message();
}

TEST(SafetensorsHeader, AcceptsWhatTheFormatAllows) {
  EXPECT_EQ(refusal(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8), "accepted");
  EXPECT_EQ(refusal(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})", 4), "accepted");
  EXPECT_EQ(refusal(R"({"e":{"dtype":"F32","shape":[0,7],"data_offsets":[4,4]},"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})", 4), "accepted");
  EXPECT_EQ(refusal(R"({"__metadata__":{"format":"pt"}})", 0), "accepted");
  EXPECT_EQ(refusal("{}   ", 0), "accepted");
}

struct BadHeader {
  const char* name;
  std::string header;
  uint64_t bytes;
  std::vector<std::string> words;
};
class BadHeaders : public testing::TestWithParam<BadHeader> {};
TEST_P(BadHeaders, AreRefusedWithWords) {
  const std::string message = refusal(GetParam().header, GetParam().bytes);
  EXPECT_THAT(message, HasSubstr("m.safetensors"));
  for (const std::string& w : GetParam().words) EXPECT_THAT(message, HasSubstr(w));
}
INSTANTIATE_TEST_SUITE_P(
    All, BadHeaders,
    testing::Values(
        BadHeader{"twice", R"({"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"I8","shape":[1],"data_offsets":[1,2]}})", 2, {"'a'", "twice"}},
        BadHeader{"dtype", R"({"a":{"dtype":"X9","shape":[1],"data_offsets":[0,1]}})", 1, {"'a'", "X9"}},
        BadHeader{"reversed", R"({"a":{"dtype":"I8","shape":[1],"data_offsets":[1,0]}})", 1, {"'a'", "before"}},
        BadHeader{"overflow_to_zero", R"({"a":{"dtype":"I8","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0, {"'a'", "overflow"}},
        BadHeader{"overflow_of_bytes", R"({"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]}})", 0, {"'a'", "overflow"}},
        BadHeader{"same_range", R"({"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1, {"'a'", "'b'", "share bytes"}},
        BadHeader{"gap", R"({"a":{"dtype":"I8","shape":[1],"data_offsets":[1,2]}})", 2, {"'a'", "belong to none"}},
        BadHeader{"trailing", R"({"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 5, {"4 bytes"}},
        BadHeader{"truncated", R"({"a":{"dtype":"I8","shape":[9],"data_offsets":[0,9]}})", 5, {"'a'", "truncated"}},
        BadHeader{"size", R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4, {"'a'", "needs 8 bytes"}},
        BadHeader{"metadata_number", R"({"__metadata__":{"n":1}})", 0, {"__metadata__", "'n'"}},
        BadHeader{"metadata_text", R"({"__metadata__":"x"})", 0, {"__metadata__"}},
        BadHeader{"negative", R"({"a":{"dtype":"I8","shape":[-1],"data_offsets":[0,0]}})", 0, {"'a'", "shape"}},
        BadHeader{"fraction", R"({"a":{"dtype":"I8","shape":[1.5],"data_offsets":[0,1]}})", 1, {"'a'", "shape"}},
        BadHeader{"huge_number", R"({"a":{"dtype":"I8","shape":[99999999999999999999],"data_offsets":[0,1]}})", 1, {"'a'", "shape"}},
        BadHeader{"three_offsets", R"({"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1,2]}})", 1, {"'a'", "data_offsets"}},
        BadHeader{"no_dtype", R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1, {"'a'", "dtype"}},
        BadHeader{"extra_field", R"({"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1],"x":1}})", 1, {"'a'", "'x'"}},
        BadHeader{"list", "[]", 0, {"object"}}, BadHeader{"no_json", "{\"a\":", 0, {"JSON"}},
        BadHeader{"deep", "{\"a\":" + std::string(100000, '['), 0, {"nested"}}),
    [](const auto& i) { return i.param.name; });

// The damaged files of tests/data/broken that have a bad header, each with the words its error must hold.
TEST(SafetensorsBroken, EveryFixtureIsRefusedWithItsWords) {
  int seen = 0;
  for (const auto& entry : fs::directory_iterator(Path(MI_SOURCE_DIR) / "tests" / "data" / "broken")) {
    const auto expected = read_json(entry.path() / "expect.json");
    if (!expected.ok() || !fs::exists(entry.path() / "model.safetensors")) continue;
    const auto file = Safetensors::open(entry.path() / "model.safetensors");
    if ((*expected)["at"] != "header" && !(*expected)["why"].get<std::string>().starts_with("the file is empty")) {
      EXPECT_TRUE(file.ok()) << entry.path();      // broken in other ways: the container itself is sound
      continue;
    }
    ++seen;
    ASSERT_FALSE(file.ok()) << entry.path();
    for (const Json& word : (*expected)["mention"]) EXPECT_THAT(file.error().message(), HasSubstr(word.get<std::string>()));
  }
  EXPECT_GE(seen, 9);
}

// A header of many tensors takes time in proportion; with a search per name this would not end.
TEST(SafetensorsHeader, ManyTensors) {
  std::string header = "{";
  const int n = kSanitized ? 20000 : 200000;
  for (int i = 0; i < n; ++i) header += fmt::format(R"({}"layers.{}.w":{{"dtype":"U8","shape":[1],"data_offsets":[{},{}]}})", i ? "," : "", i, i, i + 1);
  const auto entries = Safetensors::parse_header(header + "}", n, "m", nullptr);
  ASSERT_TRUE(entries.ok()) << entries.error().message();
  EXPECT_EQ(entries->size(), size_t(n));
  EXPECT_EQ(entries->back().name, fmt::format("layers.{}.w", n - 1));
}

class SafetensorsFile : public testing::Test {
 protected:
  void put(uint64_t length, const std::string& rest) {
    std::string s(8, '\0');
    std::memcpy(s.data(), &length, 8);
    ASSERT_TRUE(write_file(path_, s + rest).ok());
  }
  const TempDir dir_;
  const fs::path path_ = dir_ / "x.safetensors";
};

TEST_F(SafetensorsFile, WritesWhatItReads) {
  auto w = SafetensorsWriter::create(path_, {{"a", DType::kF32, {2, 2}}, {"empty", DType::kI8, {0}}, {"b", DType::kBF16, {3}}}).value();
  const float a[] = {1, 2, 3, 4};
  const uint16_t b[] = {0x3f80, 0x4000, 0xc000};
  ASSERT_TRUE(w.write(std::as_bytes(std::span(a, 1))).ok());      // in parts
  ASSERT_TRUE(w.write(std::as_bytes(std::span(a + 1, 3))).ok());
  ASSERT_TRUE(w.write(std::as_bytes(std::span(b))).ok());
  ASSERT_TRUE(w.finish().ok());
  const auto s = Safetensors::open(path_).value();
  EXPECT_EQ(s.entries().size(), 3u);
  EXPECT_THAT(to_f32_vector(*s.tensor("a")), testing::ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(to_f32_vector(*s.tensor("b")), testing::ElementsAre(1, 2, -2));
  EXPECT_EQ(s.tensor("empty")->count(), 0);
  EXPECT_THAT(s.tensor("c").error().message(), HasSubstr("'c'"));
}

TEST_F(SafetensorsFile, LengthIsCheckedBeforeAnythingIsRead) {
  for (uint64_t length : {uint64_t(1) << 63, ~uint64_t(0), uint64_t(1) << 40, uint64_t(3)}) {
    put(length, "{}");
    EXPECT_THAT(Safetensors::open(path_).error().message(), HasSubstr("header")) << length;
  }
  ASSERT_TRUE(write_file(path_, "").ok());
  EXPECT_THAT(Safetensors::open(path_).error().message(), HasSubstr("empty"));
  ASSERT_TRUE(write_file(path_, "1234567").ok());
  EXPECT_FALSE(Safetensors::open(path_).ok());
}

TEST_F(SafetensorsFile, AnyHeaderSizeReads) {
  // Around the borders where others' buffers ended, and around our own 1 MB.
  const std::string body = R"({"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}})";
  for (size_t base : {size_t(100000), size_t(1) << 20})
    for (size_t n = base - 10; n <= base + 10; ++n) {
      put(n, body + std::string(n - body.size(), ' ') + "\x07");
      const auto s = Safetensors::open(path_);
      ASSERT_TRUE(s.ok()) << n << s.error().message();
      EXPECT_EQ(int(s->tensor("a")->data[0]), 7);
    }
  const size_t large = (kSanitized ? 11 : 101) << 20;
  put(large, body + std::string(large - body.size(), ' ') + "\x07");
  EXPECT_TRUE(Safetensors::open(path_).ok());
}

}  // namespace
}  // namespace mi
