#pragma once
// The one packed layout of weight matrices: [N/16][K/g][16][g], g = 4 / bytes per element (int8 4, bf16 2, f32 1), so a
// 64-byte line holds, for 16 output columns, the g consecutive k values that one 32-bit lane multiplies. AMX tiles
// (tdpbssd, tdpbf16ps), AVX-512 VNNI / BF16, AVX2 and the scalar reference all read it. N is padded to a multiple of
// 16, K to a multiple of 64, with zeros.
//
// int4: [N/16][K/8][16][4] bytes, two int8 lines in one: byte j of a column has k = j of the eight in its low half and
// k = j + 4 in its high half. So one mask gives a line of k 0-3, a shift and a mask the line of k 4-7. Halves hold q + 8,
// unsigned: they are the u8 operand of VNNI, the activations its s8 operand, both as they lie in memory, and what is too
// much, 8 * sum x, depends on row and group only. (Signed halves would take a subtraction per line, and activations of
// q + 128 a sum per column and group beside the scales.) Padding holds 8, a zero.

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

// Byte index of W[n][k] in the packed int4 matrix; the low half for k % 8 < 4.
constexpr int64_t packed_i4_byte(int64_t n, int64_t k, int64_t k_pad) {
  return ((n / 16) * (k_pad / 8) + k / 8) * 64 + (n % 16) * 4 + k % 4;
}
// Index of the scale of column n and group g.
constexpr int64_t packed_scale_index(int64_t n, int64_t g, int64_t groups) {
  return (n / 16 * groups + g) * 16 + n % 16;
}

// w row-major [n, k] -> rows [n_offset, n_offset + n) of the packed matrix at out. Parts stacked into one matrix (Q, K,
// V) are packed in ascending order of n_offset, any value; each call also zeroes the columns up to pad_k(k) and the
// rows up to the next multiple of 16, so the last one leaves the padding right.
void pack_i8(const int8_t* w, int64_t n, int64_t k, int8_t* out, int64_t n_offset);
void pack_bf16(const uint16_t* w, int64_t n, int64_t k, uint16_t* out, int64_t n_offset);
void pack_f32(const float* w, int64_t n, int64_t k, float* out, int64_t n_offset);
// w: rows of tensor/int4.h, int4_row_bytes(k) bytes each.
void pack_i4(const uint8_t* w, int64_t n, int64_t k, uint8_t* out, int64_t n_offset);
// scale row-major [n, groups] -> columns [n_offset, n_offset + n) of [pad_n/16][groups][16]; the rest is left as it is.
void pack_scales_i4(const float* scale, int64_t n, int64_t groups, float* out, int64_t n_offset);
// Back to row-major [n, k].
void unpack_i8(const int8_t* packed, int64_t n, int64_t k, int8_t* w);
void unpack_bf16(const uint16_t* packed, int64_t n, int64_t k, uint16_t* w);
void unpack_f32(const float* packed, int64_t n, int64_t k, float* w);
void unpack_i4(const uint8_t* packed, int64_t n, int64_t k, int8_t* w);
// colsum[n] = 128 * sum_k w[n][k]
void colsum_i8(const int8_t* w, int64_t n, int64_t k, int32_t* colsum);

}  // namespace mi::kernels
