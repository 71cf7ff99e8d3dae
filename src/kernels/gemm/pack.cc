#include "kernels/gemm/pack.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "tensor/int4.h"

namespace mi::kernels {
namespace {

// One row into its tile: group i of g elements (4 bytes) goes to word i * 16 of `lane`. Words are copied as uint32
// whatever the element type, since a group is 4 bytes in every format.
template <typename T>
void pack_row(const T* w, int64_t k, int64_t k_pad, T* lane) {
  constexpr int64_t g = 4 / int64_t(sizeof(T));
  const int64_t full = k / g;
  for (int64_t i = 0; i < full; ++i) std::memcpy(lane + i * 16 * g, w + i * g, 4);
  if (full * g < k) {
    T last[g] = {};
    std::memcpy(last, w + full * g, size_t(k - full * g) * sizeof(T));
    std::memcpy(lane + full * 16 * g, last, 4);
  }
  const T zero[g] = {};
  for (int64_t i = (k + g - 1) / g; i < k_pad / g; ++i) std::memcpy(lane + i * 16 * g, zero, 4);
}

// Rows are taken in stretches of kStretch elements, so that the lines of a tile being filled stay in the L1 cache while
// its 16 rows pass.
template <typename T>
void pack(const T* w, int64_t n, int64_t k, T* out, int64_t n_offset) {
  constexpr int64_t g = 4 / int64_t(sizeof(T));
  constexpr int64_t kStretch = 256 * g;
  const int64_t k_pad = pad_k(k), n_end = n_offset + n;
  for (int64_t tile = n_offset / kNTile; tile * kNTile < n_end; ++tile) {
    T* base = out + tile * kNTile * k_pad;
    const int64_t first = std::max(tile * kNTile, n_offset), last = std::min((tile + 1) * kNTile, n_end);
    for (int64_t k0 = 0; k0 < k_pad; k0 += kStretch) {
      const int64_t pad = std::min(kStretch, k_pad - k0), len = std::clamp<int64_t>(k - k0, 0, pad);
      T* stretch = base + k0 * kNTile;
      for (int64_t r = first; r < last; ++r)
        pack_row(w + (r - n_offset) * k + std::min(k0, k), len, pad, stretch + (r % kNTile) * g);
      for (int64_t r = last; r < (tile + 1) * kNTile && last == n_end; ++r)
        pack_row<T>(w, 0, pad, stretch + (r % kNTile) * g);
    }
  }
}

template <typename T>
void unpack(const T* packed, int64_t n, int64_t k, T* w) {
  constexpr int64_t g = 4 / int64_t(sizeof(T));
  const int64_t k_pad = pad_k(k);
  for (int64_t r = 0; r < n; ++r)
    for (int64_t i = 0; i < k; ++i) w[r * k + i] = packed[packed_index(r, i, k_pad, g)];
}

// One int4 row of k elements into its place in a tile: eight elements are four bytes, 64 bytes apart. Padding up to k_pad.
void pack_i4_row(const uint8_t* w, int64_t k, int64_t k_pad, uint8_t* lane) {
  int64_t i = 0;
  for (; i + 8 <= k; i += 8, w += 4, lane += 64) {
    const uint8_t four[4] = {uint8_t((w[0] & 15) | (w[2] & 15) << 4), uint8_t(w[0] >> 4 | (w[2] & 0xf0)),
                             uint8_t((w[1] & 15) | (w[3] & 15) << 4), uint8_t(w[1] >> 4 | (w[3] & 0xf0))};
    std::memcpy(lane, four, 4);
  }
  for (; i < k_pad; i += 8, lane += 64) {
    uint8_t eight[8];
    for (int64_t j = 0; j < 8; ++j) eight[j] = i + j < k ? uint8_t(int4_at(w, j) + 8) : uint8_t(8);
    for (int64_t j = 0; j < 4; ++j) lane[j] = uint8_t(eight[j] | eight[j + 4] << 4);
    w += 4;
  }
}

}  // namespace

void pack_i4(const uint8_t* w, int64_t n, int64_t k, uint8_t* out, int64_t n_offset) {
  constexpr int64_t kStretch = 2048;  // as pack(): the lines being filled stay in the L1 cache
  const int64_t k_pad = pad_k(k), n_end = n_offset + n, row_bytes = int4_row_bytes(k);
  for (int64_t tile = n_offset / kNTile; tile * kNTile < n_end; ++tile) {
    uint8_t* base = out + tile * kNTile * k_pad / 2;
    const int64_t first = std::max(tile * kNTile, n_offset), last = std::min((tile + 1) * kNTile, n_end);
    for (int64_t k0 = 0; k0 < k_pad; k0 += kStretch) {
      const int64_t pad = std::min(kStretch, k_pad - k0), len = std::clamp<int64_t>(k - k0, 0, pad);
      uint8_t* stretch = base + k0 * kNTile / 2;
      for (int64_t r = first; r < last; ++r)
        pack_i4_row(w + (r - n_offset) * row_bytes + std::min(k0, k) / 2, len, pad, stretch + (r % kNTile) * 4);
      for (int64_t r = last; r < (tile + 1) * kNTile && last == n_end; ++r)
        pack_i4_row(w, 0, pad, stretch + (r % kNTile) * 4);
    }
  }
}

void pack_scales_i4(const float* scale, int64_t n, int64_t groups, float* out, int64_t n_offset) {
  for (int64_t r = 0; r < n; ++r)
    for (int64_t g = 0; g < groups; ++g) out[packed_scale_index(n_offset + r, g, groups)] = scale[r * groups + g];
}

void unpack_i4(const uint8_t* packed, int64_t n, int64_t k, int8_t* w) {
  const int64_t k_pad = pad_k(k);
  for (int64_t r = 0; r < n; ++r)
    for (int64_t i = 0; i < k; ++i)
      w[r * k + i] = int8_t((packed[packed_i4_byte(r, i, k_pad)] >> (i % 8 / 4 * 4) & 15) - 8);
}

void pack_i8(const int8_t* w, int64_t n, int64_t k, int8_t* out, int64_t n_offset) { pack(w, n, k, out, n_offset); }
void pack_bf16(const uint16_t* w, int64_t n, int64_t k, uint16_t* out, int64_t n_offset) {
  pack(w, n, k, out, n_offset);
}
void pack_f32(const float* w, int64_t n, int64_t k, float* out, int64_t n_offset) { pack(w, n, k, out, n_offset); }
void unpack_i8(const int8_t* packed, int64_t n, int64_t k, int8_t* w) { unpack(packed, n, k, w); }
void unpack_bf16(const uint16_t* packed, int64_t n, int64_t k, uint16_t* w) { unpack(packed, n, k, w); }
void unpack_f32(const float* packed, int64_t n, int64_t k, float* w) { unpack(packed, n, k, w); }

void colsum_i8(const int8_t* w, int64_t n, int64_t k, int32_t* colsum) {
  MI_CHECK(k <= 131072, "k {}: 128 * sum would leave int32", k);
  for (int64_t r = 0; r < n; ++r) {
    int32_t sum = 0;
    for (int64_t i = 0; i < k; ++i) sum += w[r * k + i];
    colsum[r] = 128 * sum;
  }
}

}  // namespace mi::kernels
