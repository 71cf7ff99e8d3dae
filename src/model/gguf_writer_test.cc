#include "model/gguf_writer.h"

#include <cmath>
#include <cstring>

#include "model/gguf.h"
#include "model/testing.h"

namespace mi::model {
namespace {

using testing::read_text;

struct Block {
  float d = 0;
  std::vector<int> q;
};
std::vector<Block> blocks(const std::vector<std::byte>& bytes) {
  std::vector<Block> out;
  for (size_t at = 0; at < bytes.size(); at += kQ8BlockBytes) {
    Block b;
    F16 h{};
    std::memcpy(&h.bits, bytes.data() + at, 2);
    b.d = to_f32(h);
    for (size_t i = 0; i < size_t(kGgufBlock); ++i) b.q.push_back(int8_t(bytes[at + 2 + i]));
    out.push_back(std::move(b));
  }
  return out;
}
std::vector<Block> rounded(std::vector<float> x, bool* fits = nullptr) {
  x.resize((x.size() + kGgufBlock - 1) / kGgufBlock * kGgufBlock);
  std::vector<std::byte> out(gguf_row_bytes(GgufType::kQ8_0, int64_t(x.size())));
  const bool ok = round_q8_0(x.data(), int64_t(x.size()), out.data());
  if (fits) *fits = ok;
  return blocks(out);
}

TEST(Q80, HalvesGoAwayFromZero) {
  const Block b = rounded({127, 0.5f, -0.5f, 1.5f, 2.5f, -2.5f, 0.49999997f, 126.5f, -127, 3.2f})[0];
  EXPECT_EQ(b.d, 1.0f);
  EXPECT_EQ(std::vector<int>(b.q.begin(), b.q.begin() + 11),
            (std::vector<int>{127, 1, -1, 2, 3, -3, 0, 127, -127, 3, 0}));
}

TEST(Q80, EqualsTheLibraryRounding) {
  std::vector<float> x;
  for (uint64_t i = 0; i < 64 * kGgufBlock; ++i)
    x.push_back(random_normal(3, i) * std::ldexp(1.0f, int(i / 32 % 40) - 20));
  const std::vector<Block> out = rounded(x);
  for (size_t k = 0; k < out.size(); ++k) {
    float most = 0;
    for (size_t i = 0; i < 32; ++i) most = std::max(most, std::fabs(x[32 * k + i]));
    const float d = most / 127.0f, inverse = 1.0f / d;
    EXPECT_EQ(out[k].d, to_f32(to_f16(d)));
    for (size_t i = 0; i < 32; ++i) ASSERT_EQ(out[k].q[i], int(std::roundf(x[32 * k + i] * inverse))) << k << " " << i;
  }
}

TEST(Q80, ZerosSubnormalsAndWhatDoesNotFit) {
  bool fits = false;
  EXPECT_EQ(rounded({0, -0.0f}, &fits)[0].q[0], 0);
  EXPECT_TRUE(fits);
  for (float tiny : {1e-45f, 1e-38f, 1e-40f}) {
    const Block b = rounded({tiny, -tiny}, &fits)[0];
    EXPECT_TRUE(fits);
    EXPECT_EQ(b.d * float(b.q[0]), 0.0f);
  }
  rounded({8e6f}, &fits);
  EXPECT_TRUE(fits);
  rounded({9e6f}, &fits);  // the scale is above 65504
  EXPECT_FALSE(fits);
}

TEST(Q80, IntegersStayWhenTheyAreThere) {
  std::vector<int8_t> q;
  for (int i = -32; i < 32; ++i) q.push_back(int8_t(i * 3));
  std::vector<std::byte> out(2 * kQ8BlockBytes);
  ASSERT_TRUE(pack_q8_0(q.data(), 0.0123f, 64, out.data()));
  for (const Block& b : blocks(out)) EXPECT_EQ(b.d, to_f32(to_f16(0.0123f)));
  for (size_t i = 0; i < 64; ++i) EXPECT_EQ(blocks(out)[i / 32].q[i % 32], q[i]);
  EXPECT_FALSE(pack_q8_0(q.data(), 1e5f, 64, out.data()));
  EXPECT_FALSE(pack_q8_0(q.data(), std::nanf(""), 64, out.data()));
}

// d and the 32 numbers of each block, in their order.
std::vector<Block> blocks_q4(const std::vector<std::byte>& bytes) {
  std::vector<Block> out;
  for (size_t at = 0; at < bytes.size(); at += kQ4BlockBytes) {
    Block b;
    F16 h{};
    std::memcpy(&h.bits, bytes.data() + at, 2);
    b.d = to_f32(h);
    for (size_t i = 0; i < 32; ++i) b.q.push_back((int(bytes[at + 2 + i % 16]) >> (i / 16 * 4) & 15) - 8);
    out.push_back(std::move(b));
  }
  return out;
}
std::vector<Block> rounded_q4(std::vector<float> x, bool* fits = nullptr) {
  x.resize((x.size() + kGgufBlock - 1) / kGgufBlock * kGgufBlock);
  std::vector<std::byte> out(gguf_row_bytes(GgufType::kQ4_0, int64_t(x.size())));
  const bool ok = round_q4_0(x.data(), int64_t(x.size()), out.data());
  if (fits) *fits = ok;
  return blocks_q4(out);
}

TEST(Q40, TheLargestMeetsMinusEightAndItsOppositeIsCut) {
  const Block plus = rounded_q4({8, -8, 7.5f, 0.5f, -0.5f, 1, 0.49f})[0];
  EXPECT_EQ(plus.d, -1.0f);
  EXPECT_EQ(std::vector<int>(plus.q.begin(), plus.q.begin() + 8), (std::vector<int>{-8, 7, -7, 0, 1, -1, 0, 0}));
  const Block minus = rounded_q4({-8, 8, 3})[0];
  EXPECT_EQ(minus.d, 1.0f);
  EXPECT_EQ(std::vector<int>(minus.q.begin(), minus.q.begin() + 4), (std::vector<int>{-8, 7, 3, 0}));
}

TEST(Q40, ZerosSubnormalsAndWhatDoesNotFit) {
  bool fits = false;
  for (float tiny : {0.0f, 1e-45f, 1e-38f}) {
    const Block b = rounded_q4({tiny, -tiny}, &fits)[0];
    EXPECT_TRUE(fits);
    for (int q : b.q) EXPECT_EQ(b.d * float(q), 0.0f);
  }
  rounded_q4({5e5f}, &fits);
  EXPECT_TRUE(fits);
  rounded_q4({6e5f}, &fits);
  EXPECT_FALSE(fits);
}

TEST(Q40, IntegersStayWhenTheyAreThere) {
  std::vector<int8_t> q;
  for (int i = 0; i < 64; ++i) q.push_back(int8_t(i * 7 % 16 - 8));
  std::vector<std::byte> out(2 * kQ4BlockBytes);
  ASSERT_TRUE(pack_q4_0(q.data(), -0.0123f, 64, out.data()));
  for (const Block& b : blocks_q4(out)) EXPECT_EQ(b.d, to_f32(to_f16(-0.0123f)));
  for (size_t i = 0; i < 64; ++i) EXPECT_EQ(blocks_q4(out)[i / 32].q[i % 32], q[i]);
  EXPECT_FALSE(pack_q4_0(q.data(), 1e5f, 64, out.data()));
}

TEST(GgufWriter, TheReaderAcceptsItAndDataLieAligned) {
  TempDir dir;
  GgufKeys keys, more;
  keys.put("general.architecture", "llama");
  keys.put("a.flag", true);
  more.put("a.number", uint32_t(7));
  more.put("a.float", 0.5f);
  more.put("a.words", std::vector<std::string>{"x", "", "a b"});
  more.put("a.ids", std::vector<int32_t>{-1, 2});
  keys.append(more);
  const std::vector<GgufTensor> tensors = {
      {"odd", GgufType::kF32, {3}}, {"experts", GgufType::kQ8_0, {2, 3, 64}}, {"half", GgufType::kBF16, {5, 1}}};
  const uint64_t size = gguf_file_bytes(keys, tensors);
  auto file = FileWriter::create(dir / "x.gguf");
  ASSERT_TRUE(file.ok());
  auto w = GgufWriter::begin(&*file, keys, tensors);
  ASSERT_TRUE(w.ok());
  std::string data;
  for (size_t t = 0; t < tensors.size(); ++t) {
    const std::string bytes(tensors[t].bytes(), char('A' + t));
    // In two parts, as a caller with a small buffer does.
    ASSERT_TRUE(w->write(std::as_bytes(std::span(bytes).first(2))).ok());
    ASSERT_TRUE(w->write(std::as_bytes(std::span(bytes).subspan(2))).ok());
  }
  w->finish();
  ASSERT_TRUE(file->finish().ok());

  const auto s = read_gguf(dir / "x.gguf");
  ASSERT_TRUE(s.ok()) << s.error().message();
  EXPECT_EQ(s->version, 3u);
  ASSERT_EQ(s->tensors.size(), 3u);
  EXPECT_EQ(s->keys.size(), 6u);
  EXPECT_EQ(s->architecture(), "llama");
  const std::string text = read_text(dir / "x.gguf");
  EXPECT_EQ(text.size(), size);
  const size_t a = text.find("AAAAAAAAAAAA"), b = text.find(std::string(2 * 3 * 2 * 34, 'B')),
               c = text.find("CCCCCCCCCC");
  EXPECT_EQ(a % 32, 0u);
  EXPECT_EQ(b, a + 32);
  EXPECT_EQ(c, b + (2 * 3 * 2 * 34 + 31) / 32 * 32);
  // Innermost dimension first.
  const uint64_t dims[] = {64, 3, 2};
  EXPECT_NE(text.find(std::string(reinterpret_cast<const char*>(dims), sizeof(dims))), std::string::npos);
}

TEST(GgufWriterDeathTest, TooManyOrTooFewBytesAreBugs) {
  TempDir dir;
  auto file = FileWriter::create(dir / "x.gguf");
  ASSERT_TRUE(file.ok());
  auto w = GgufWriter::begin(&*file, GgufKeys(), {{"t", GgufType::kF32, {2}}});
  ASSERT_TRUE(w.ok());
  EXPECT_DEATH((void)w->write(std::vector<std::byte>(12)), "too many");
  EXPECT_DEATH(w->finish(), "");
}

}  // namespace
}  // namespace mi::model
