#include "model/formats/gguf_blocks.h"

#include <cstring>

#include "base/check.h"
#include "model/formats/codes.h"
#include "tensor/dtype.h"

namespace mi::model::formats {
namespace {

using Byte = uint8_t;
using Read = void (*)(const Byte* block, float* out);

float half(const Byte* p) {
  F16 h;
  std::memcpy(&h, p, 2);
  return to_f32(h);
}

void f32(const Byte* b, float* y) { std::memcpy(y, b, 4); }
void f16(const Byte* b, float* y) { *y = half(b); }
void bf16(const Byte* b, float* y) {
  BF16 v;
  std::memcpy(&v, b, 2);
  *y = to_f32(v);
}

// 16 bytes of nibbles: low ones, then high ones.
int nibble(const Byte* qs, int i) { return i < 16 ? qs[i] & 15 : qs[i - 16] >> 4; }
// The fifth bit of 32 numbers, the first lowest.
int fifth(const Byte* qh, int i) { return (qh[i / 8] >> (i % 8) & 1) << 4; }

void q4_0(const Byte* b, float* y) {
  const float d = half(b);
  for (int i = 0; i < 32; ++i) y[i] = d * float(nibble(b + 2, i) - 8);
}
void q4_1(const Byte* b, float* y) {
  const float d = half(b), m = half(b + 2);
  for (int i = 0; i < 32; ++i) y[i] = d * float(nibble(b + 4, i)) + m;
}
void q5_0(const Byte* b, float* y) {
  const float d = half(b);
  for (int i = 0; i < 32; ++i) y[i] = d * float((nibble(b + 6, i) | fifth(b + 2, i)) - 16);
}
void q5_1(const Byte* b, float* y) {
  const float d = half(b), m = half(b + 2);
  for (int i = 0; i < 32; ++i) y[i] = d * float(nibble(b + 8, i) | fifth(b + 4, i)) + m;
}
void q8_0(const Byte* b, float* y) {
  const float d = half(b);
  for (int i = 0; i < 32; ++i) y[i] = d * float(int8_t(b[2 + i]));
}
void mxfp4(const Byte* b, float* y) {
  const float d = e8m0_value(b[0]);
  for (int i = 0; i < 32; ++i) y[i] = kE2M1[size_t(nibble(b + 1, i))] * d;
}

constexpr int8_t kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

void iq4_nl(const Byte* b, float* y) {
  const float d = half(b);
  for (int i = 0; i < 32; ++i) y[i] = d * float(kIq4[nibble(b + 2, i)]);
}
// Eight groups of 32 with scales of 6 bits: four low in bytes 4-7, two high in bytes 2-3.
void iq4_xs(const Byte* b, float* y) {
  const float d = half(b);
  for (int g = 0; g < 8; ++g) {
    const int low = b[4 + g / 2] >> (4 * (g % 2)) & 15, high = b[2 + g / 4] >> (2 * (g % 4)) & 3;
    const float dl = d * float((low | high << 4) - 32);
    for (int i = 0; i < 32; ++i) y[32 * g + i] = dl * float(kIq4[nibble(b + 8 + 16 * g, i)]);
  }
}

// The layout that Q2_K and Q3_K share: number 128 h + 32 j + l (l < 32) has two bits at 2 j of byte 32 h + l.
int two_bits(const Byte* qs, int i) { return qs[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3; }

// 16 groups of 16, each byte of scales a scale (low) and a minimum (high).
void q2_k(const Byte* b, float* y) {
  const float d = half(b + 80), dmin = half(b + 82);
  for (int i = 0; i < 256; ++i)
    y[i] = d * float(b[i / 16] & 15) * float(two_bits(b + 16, i)) - dmin * float(b[i / 16] >> 4);
}
// A third bit in hmask (bytes 0-31): bit i / 32 of byte i % 32; where it is 0, 4 is subtracted. 16 scales of 6 bits.
void q3_k(const Byte* b, float* y) {
  const float d = half(b + 108);
  const Byte* s = b + 96;
  for (int g = 0; g < 16; ++g) {
    const int low = g < 8 ? s[g] & 15 : s[g - 8] >> 4, high = s[8 + g % 4] >> (2 * (g / 4)) & 3;
    const float dl = d * float((low | high << 4) - 32);
    for (int i = 16 * g; i < 16 * g + 16; ++i)
      y[i] = dl * float(two_bits(b + 32, i) - (b[i % 32] >> (i / 32) & 1 ? 0 : 4));
  }
}

// Q4_K and Q5_K: scales and minima of 8 groups of 32, 6 bits each, in 12 bytes.
void scale_min(const Byte* s, int g, int* scale, int* min) {
  if (g < 4) {
    *scale = s[g] & 63;
    *min = s[g + 4] & 63;
  } else {
    *scale = (s[g + 4] & 15) | (s[g - 4] >> 6) << 4;
    *min = s[g + 4] >> 4 | (s[g] >> 6) << 4;
  }
}
// Of each 32 bytes of qs the low nibbles are one group, the high ones the next; high: bit g of byte i, or nullptr.
void k4_k5(const Byte* b, const Byte* high, const Byte* qs, float* y) {
  const float d = half(b), dmin = half(b + 2);
  for (int g = 0; g < 8; ++g) {
    int scale, min;
    scale_min(b + 4, g, &scale, &min);
    const float dl = d * float(scale), ml = dmin * float(min);
    for (int i = 0; i < 32; ++i) {
      const Byte q = qs[g / 2 * 32 + i];
      const int v = (g % 2 ? q >> 4 : q & 15) + (high && high[i] >> g & 1 ? 16 : 0);
      y[32 * g + i] = dl * float(v) - ml;
    }
  }
}
void q4_k(const Byte* b, float* y) { k4_k5(b, nullptr, b + 16, y); }
void q5_k(const Byte* b, float* y) { k4_k5(b, b + 16, b + 48, y); }

// Low four bits in bytes 0-127, high two in bytes 128-191, 16 int8 scales, the scale of scales.
void q6_k(const Byte* b, float* y) {
  const float d = half(b + 208);
  for (int i = 0; i < 256; ++i) {
    const int h = i / 128, j = i % 128 / 32, l = i % 32;  // half, quarter of it, place
    const Byte low = b[64 * h + 32 * (j % 2) + l], high = b[128 + 32 * h + l];
    const int q = (j < 2 ? low & 15 : low >> 4) | (high >> (2 * j) & 3) << 4;
    y[i] = d * float(int8_t(b[192 + i / 16])) * float(q - 32);
  }
}

struct KnownBlock {
  GgufBlock block;
  Read read;  // nullptr: not read
};
constexpr KnownBlock kKnownBlocks[] = {{{0, "F32", 1, 4}, f32},
                            {{1, "F16", 1, 2}, f16},
                            {{30, "BF16", 1, 2}, bf16},
                            {{8, "Q8_0", 32, 34}, q8_0},
                            {{2, "Q4_0", 32, 18}, q4_0},
                            {{3, "Q4_1", 32, 20}, q4_1},
                            {{6, "Q5_0", 32, 22}, q5_0},
                            {{7, "Q5_1", 32, 24}, q5_1},
                            {{10, "Q2_K", 256, 84}, q2_k},
                            {{11, "Q3_K", 256, 110}, q3_k},
                            {{12, "Q4_K", 256, 144}, q4_k},
                            {{13, "Q5_K", 256, 176}, q5_k},
                            {{14, "Q6_K", 256, 210}, q6_k},
                            {{20, "IQ4_NL", 32, 18}, iq4_nl},
                            {{23, "IQ4_XS", 256, 136}, iq4_xs},
                            {{39, "MXFP4", 32, 17}, mxfp4},
                            {{9, "Q8_1", 32, 36}, nullptr},
                            {{15, "Q8_K", 256, 292}, nullptr},
                            {{16, "IQ2_XXS", 256, 66}, nullptr},
                            {{17, "IQ2_XS", 256, 74}, nullptr},
                            {{18, "IQ3_XXS", 256, 98}, nullptr},
                            {{19, "IQ1_S", 256, 50}, nullptr},
                            {{21, "IQ3_S", 256, 110}, nullptr},
                            {{22, "IQ2_S", 256, 82}, nullptr},
                            {{24, "I8", 1, 1}, nullptr},
                            {{25, "I16", 1, 2}, nullptr},
                            {{26, "I32", 1, 4}, nullptr},
                            {{27, "I64", 1, 8}, nullptr},
                            {{28, "F64", 1, 8}, nullptr},
                            {{29, "IQ1_M", 256, 56}, nullptr},
                            {{34, "TQ1_0", 256, 54}, nullptr},
                            {{35, "TQ2_0", 256, 66}, nullptr}};

const KnownBlock* find(uint32_t type) {
  for (const KnownBlock& k : kKnownBlocks)
    if (k.block.type == type) return &k;
  return nullptr;
}

}  // namespace

const GgufBlock* find_gguf_block(uint32_t type) {
  const KnownBlock* k = find(type);
  return k ? &k->block : nullptr;
}

bool can_read_gguf(uint32_t type) {
  const KnownBlock* k = find(type);
  return k && k->read;
}

std::string readable_gguf_types() {
  std::string s;
  for (const KnownBlock& k : kKnownBlocks)
    if (k.read) s += (s.empty() ? "" : ", ") + std::string(k.block.name);
  return s;
}

void dequantize_rows(const GgufRows& m, int64_t first, int64_t n, float* out) {
  const KnownBlock* k = find(m.type);
  MI_CHECK(k && k->read, "GGUF type {}", m.type);
  const int64_t row_blocks = m.cols / k->block.values;
  const Byte* in = reinterpret_cast<const Byte*>(m.data) + first * row_blocks * k->block.bytes;
  for (int64_t i = 0; i < n * row_blocks; ++i) k->read(in + i * k->block.bytes, out + i * k->block.values);
}

}  // namespace mi::model::formats
