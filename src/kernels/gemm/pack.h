#pragma once
// The one packed layout of weight matrices: [N/16][K/g][16][g], g = 4 / bytes per element (int8 4, bf16 2, f32 1), so a
// 64-byte line holds, for 16 output columns, the g consecutive k values that one 32-bit lane multiplies. AMX tiles
// (tdpbssd, tdpbf16ps), AVX-512 VNNI / BF16, AVX2 and the scalar reference all read it. N is padded to a multiple of
// 16, K to a multiple of 64, with zeros.

#include <cstdint>

namespace mi::kernels {

inline constexpr int64_t kNTile = 16;
inline constexpr int64_t kKPad = 64;
constexpr int64_t pad_n(int64_t n) { return (n + kNTile - 1) / kNTile * kNTile; }
constexpr int64_t pad_k(int64_t k) { return (k + kKPad - 1) / kKPad * kKPad; }

// Element index of W[n][k] in the packed matrix.
constexpr int64_t packed_index(int64_t n, int64_t k, int64_t k_pad, int64_t g) {
  return ((n / 16) * (k_pad / g) + k / g) * 16 * g + (n % 16) * g + k % g;
}

// w row-major [n, k] -> rows [n_offset, n_offset + n) of the packed matrix at out. Parts stacked into one matrix (Q, K,
// V) are packed in ascending order of n_offset, any value; each call also zeroes the columns up to pad_k(k) and the
// rows up to the next multiple of 16, so the last one leaves the padding right.
void pack_i8(const int8_t* w, int64_t n, int64_t k, int8_t* out, int64_t n_offset);
void pack_bf16(const uint16_t* w, int64_t n, int64_t k, uint16_t* out, int64_t n_offset);
void pack_f32(const float* w, int64_t n, int64_t k, float* out, int64_t n_offset);
// Back to row-major [n, k].
void unpack_i8(const int8_t* packed, int64_t n, int64_t k, int8_t* w);
void unpack_bf16(const uint16_t* packed, int64_t n, int64_t k, uint16_t* w);
void unpack_f32(const float* packed, int64_t n, int64_t k, float* w);
// colsum[n] = 128 * sum_k w[n][k]
void colsum_i8(const int8_t* w, int64_t n, int64_t k, int32_t* colsum);

}  // namespace mi::kernels
