#pragma once
// The small floats that quantized checkpoints are made of.

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

namespace mi::model::formats {

// OCP MX E2M1: sign, 2 bits of exponent, 1 of mantissa; every code is a number. Codes 0-15.
inline constexpr std::array<float, 16> kE2M1 = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                                -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// E4M3 of the "fn" kind: exponent bias 7, no infinity, 0x7f and 0xff are NaN, largest 448.
constexpr float e4m3_value(uint32_t code) {
  const uint32_t exponent = (code >> 3) & 15, mantissa = code & 7;
  if ((code & 127) == 127) return std::numeric_limits<float>::quiet_NaN();
  float v = exponent == 0 ? float(mantissa) : float(mantissa + 8);  // times 2^-9 is the smallest binade
  for (uint32_t e = exponent == 0 ? 1 : exponent; e < 10; ++e) v /= 2;
  for (uint32_t e = 10; e < exponent; ++e) v *= 2;
  return code & 128 ? -v : v;
}
inline constexpr std::array<float, 256> kE4M3 = [] {
  std::array<float, 256> t{};
  for (uint32_t c = 0; c < 256; ++c) t[c] = e4m3_value(c);
  return t;
}();

// OCP MX E8M0: 2^(code - 127); 255 is NaN. Code 0 is a subnormal float.
inline float e8m0_value(uint8_t code) {
  if (code == 255) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(code == 0 ? uint32_t(1) << 22 : uint32_t(code) << 23);
}

// The 32-bit words that integers are packed into; the file's data need not be aligned.
inline uint32_t word_at(const std::byte* words, int64_t i) {
  uint32_t w;
  std::memcpy(&w, words + i * 4, 4);
  return w;
}

}  // namespace mi::model::formats
