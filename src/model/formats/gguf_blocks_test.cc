// GGUF blocks that are packed here number by number, by the rule of ggml's structs.

#include "model/formats/gguf_blocks.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <vector>

#include "tensor/dtype.h"

namespace mi::model::formats {
namespace {

using Bytes = std::vector<uint8_t>;

// 1 = 0x3c00, 0.5 = 0x3800, 0.25 = 0x3400 as fp16.
void put_half(Bytes* b, size_t at, uint16_t bits) { std::memcpy(b->data() + at, &bits, 2); }
constexpr uint16_t kHalf = 0x3800, kQuarter = 0x3400;

std::vector<float> numbers(uint32_t type, const Bytes& b) {
  const GgufBlock* block = find_gguf_block(type);
  EXPECT_EQ(int64_t(b.size()), block->bytes);
  // Two rows of one block: a row begins where the one before ends.
  Bytes two = b;
  two.insert(two.end(), b.begin(), b.end());
  std::vector<float> out(size_t(2 * block->values));
  const GgufRows m{type, reinterpret_cast<const std::byte*>(two.data()), 2, block->values};
  dequantize_rows(m, 0, 2, out.data());
  EXPECT_TRUE(std::equal(out.begin(), out.begin() + block->values, out.begin() + block->values));
  std::vector<float> second(size_t(block->values));
  dequantize_rows(m, 1, 1, second.data());
  EXPECT_TRUE(std::equal(second.begin(), second.end(), out.begin()));
  return second;
}

int some(int i, int below) { return (i * 7 + i / 16 * 3 + 1) % below; }

void expect(uint32_t type, const Bytes& b, const std::function<float(int)>& value) {
  const auto found = numbers(type, b);
  for (size_t i = 0; i < found.size(); ++i) EXPECT_EQ(found[i], value(int(i))) << i;
}

// 32 nibbles: the first half low, the second high.
void put_nibbles(Bytes* b, size_t at, const std::function<int(int)>& q) {
  for (int i = 0; i < 32; ++i) (*b)[at + size_t(i % 16)] |= uint8_t((q(i) & 15) << (i < 16 ? 0 : 4));
}
void put_fifth(Bytes* b, size_t at, const std::function<int(int)>& q) {
  for (int i = 0; i < 32; ++i) (*b)[at + size_t(i / 8)] |= uint8_t((q(i) >> 4) << (i % 8));
}

TEST(GgufBlocks, Floats) {
  Bytes b(4);
  const float x = 1.7f;
  std::memcpy(b.data(), &x, 4);
  expect(0, b, [&](int) { return x; });
  b.resize(2);
  put_half(&b, 0, kHalf);
  expect(1, b, [](int) { return 0.5f; });
  const uint16_t bf = to_bf16(-3.0f).bits;
  put_half(&b, 0, bf);
  expect(30, b, [](int) { return -3.0f; });
}

TEST(GgufBlocks, FourBits) {
  const auto q = [](int i) { return some(i, 16); };
  Bytes b(18);
  put_half(&b, 0, kHalf);
  put_nibbles(&b, 2, q);
  expect(2, b, [&](int i) { return 0.5f * float(q(i) - 8); });
  b.assign(20, 0);
  put_half(&b, 0, kHalf);
  put_half(&b, 2, kQuarter);
  put_nibbles(&b, 4, q);
  expect(3, b, [&](int i) { return 0.5f * float(q(i)) + 0.25f; });
}

TEST(GgufBlocks, FiveBits) {
  const auto q = [](int i) { return some(i, 32); };
  Bytes b(22);
  put_half(&b, 0, kHalf);
  put_fifth(&b, 2, q);
  put_nibbles(&b, 6, q);
  expect(6, b, [&](int i) { return 0.5f * float(q(i) - 16); });
  b.assign(24, 0);
  put_half(&b, 0, kHalf);
  put_half(&b, 2, kQuarter);
  put_fifth(&b, 4, q);
  put_nibbles(&b, 8, q);
  expect(7, b, [&](int i) { return 0.5f * float(q(i)) + 0.25f; });
}

TEST(GgufBlocks, EightBits) {
  Bytes b(34);
  put_half(&b, 0, kQuarter);
  for (int i = 0; i < 32; ++i) b[size_t(2 + i)] = uint8_t(i * 8 - 128);
  expect(8, b, [](int i) { return 0.25f * float(i * 8 - 128); });
}

TEST(GgufBlocks, MxFp4InHalves) {
  const float values[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
  Bytes b(17);
  b[0] = 129;  // 4
  put_nibbles(&b, 1, [](int i) { return i % 16; });
  expect(39, b, [&](int i) { return 4 * values[i % 16]; });
}

constexpr int kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

TEST(GgufBlocks, Iq4) {
  const auto q = [](int i) { return some(i, 16); };
  Bytes b(18);
  put_half(&b, 0, kQuarter);
  put_nibbles(&b, 2, q);
  expect(20, b, [&](int i) { return 0.25f * float(kIq4[q(i)]); });

  b.assign(136, 0);
  put_half(&b, 0, kQuarter);
  const auto scale = [](int g) { return (g * 23 + 5) % 64; };
  for (int g = 0; g < 8; ++g) {
    b[size_t(4 + g / 2)] |= uint8_t((scale(g) & 15) << (4 * (g % 2)));
    b[size_t(2 + g / 4)] |= uint8_t((scale(g) >> 4) << (2 * (g % 4)));
    put_nibbles(&b, size_t(8 + 16 * g), [&](int i) { return q(32 * g + i); });
  }
  expect(23, b, [&](int i) { return 0.25f * float(scale(i / 32) - 32) * float(kIq4[q(i)]); });
}

// Two bits of number i of 256, in the layout of Q2_K and Q3_K.
void put_two(Bytes* b, size_t at, int i, int v) {
  (*b)[at + size_t(i / 128 * 32 + i % 32)] |= uint8_t(v << (i % 128 / 32 * 2));
}

TEST(GgufBlocks, Q2K) {
  Bytes b(84);
  const auto q = [](int i) { return some(i, 4); };
  const auto scale = [](int g) { return some(g, 16); };
  const auto min = [](int g) { return some(g + 3, 16); };
  for (int g = 0; g < 16; ++g) b[size_t(g)] = uint8_t(scale(g) | min(g) << 4);
  for (int i = 0; i < 256; ++i) put_two(&b, 16, i, q(i));
  put_half(&b, 80, kHalf);
  put_half(&b, 82, kQuarter);
  expect(10, b, [&](int i) { return 0.5f * float(scale(i / 16) * q(i)) - 0.25f * float(min(i / 16)); });
}

TEST(GgufBlocks, Q3K) {
  Bytes b(110);
  const auto q = [](int i) { return some(i, 8); };  // stored + 4
  const auto scale = [](int g) { return (g * 13 + 5) % 64; };
  for (int i = 0; i < 256; ++i) {
    put_two(&b, 32, i, q(i) & 3);
    b[size_t(i % 32)] |= uint8_t((q(i) >> 2) << (i / 32));
  }
  for (int g = 0; g < 16; ++g) {
    b[size_t(96 + g % 8)] |= uint8_t((scale(g) & 15) << (g < 8 ? 0 : 4));
    b[size_t(104 + g % 4)] |= uint8_t((scale(g) >> 4) << (2 * (g / 4)));
  }
  put_half(&b, 108, kHalf);
  expect(11, b, [&](int i) { return 0.5f * float((scale(i / 16) - 32) * (q(i) - 4)); });
}

// Scales and minima of Q4_K and Q5_K: six bits each, of the groups 4-7 in two pieces.
void put_scales(Bytes* b, size_t at, const std::function<int(int)>& scale, const std::function<int(int)>& min) {
  for (int g = 0; g < 4; ++g) {
    (*b)[at + size_t(g)] |= uint8_t(scale(g));
    (*b)[at + 4 + size_t(g)] |= uint8_t(min(g));
    (*b)[at + 8 + size_t(g)] |= uint8_t((scale(g + 4) & 15) | (min(g + 4) & 15) << 4);
    (*b)[at + size_t(g)] |= uint8_t((scale(g + 4) >> 4) << 6);
    (*b)[at + 4 + size_t(g)] |= uint8_t((min(g + 4) >> 4) << 6);
  }
}

TEST(GgufBlocks, Q4KAndQ5K) {
  const auto scale = [](int g) { return (g * 23 + 5) % 64; };
  const auto min = [](int g) { return (g * 29 + 40) % 64; };
  for (const int bits : {4, 5}) {
    const auto q = [&](int i) { return some(i, 1 << bits); };
    Bytes b(bits == 4 ? 144 : 176);
    put_half(&b, 0, kHalf);
    put_half(&b, 2, kQuarter);
    put_scales(&b, 4, scale, min);
    const size_t qs = bits == 4 ? 16 : 48;
    for (int i = 0; i < 256; ++i) {
      b[qs + size_t(i / 64 * 32 + i % 32)] |= uint8_t((q(i) & 15) << (i % 64 < 32 ? 0 : 4));
      if (bits == 5) b[size_t(16 + i % 32)] |= uint8_t((q(i) >> 4) << (i / 32));
    }
    expect(bits == 4 ? 12 : 13, b,
           [&](int i) { return 0.5f * float(scale(i / 32) * q(i)) - 0.25f * float(min(i / 32)); });
  }
}

TEST(GgufBlocks, Q6K) {
  Bytes b(210);
  const auto q = [](int i) { return some(i, 64); };
  const auto scale = [](int g) { return g * 17 - 128; };
  for (int i = 0; i < 256; ++i) {
    const int h = i / 128, j = i % 128 / 32, l = i % 32;
    b[size_t(64 * h + 32 * (j & 1) + l)] |= uint8_t((q(i) & 15) << (j < 2 ? 0 : 4));
    b[size_t(128 + 32 * h + l)] |= uint8_t((q(i) >> 4) << (2 * j));
  }
  for (int g = 0; g < 16; ++g) b[size_t(192 + g)] = uint8_t(int8_t(scale(g)));
  put_half(&b, 208, kHalf);
  expect(14, b, [&](int i) { return 0.5f * float(scale(i / 16) * (q(i) - 32)); });
}

TEST(GgufBlocks, Register) {
  EXPECT_EQ(find_gguf_block(40), nullptr);
  ASSERT_NE(find_gguf_block(16), nullptr);
  EXPECT_FALSE(can_read_gguf(16));
  EXPECT_EQ(readable_gguf_types().find("IQ2_XXS"), std::string::npos);
  EXPECT_NE(readable_gguf_types().find("Q4_K"), std::string::npos);
}

}  // namespace
}  // namespace mi::model::formats
