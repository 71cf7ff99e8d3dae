#pragma once
// One layer's part of the paged cache, and which of its pages the rows of a step read and write.
//
// A page holds kPageTokens consecutive positions of one sequence. Within a layer, page p begins at data + p * page_bytes():
//   keys    [kv_heads][k_dim][64]        position fastest: sixteen lanes are sixteen positions, so scores need no reduction
//   values  [kv_heads][64][v_pad]        v_pad = v_dim rounded up to 16; padding is never read as a result
//   bfloat16: keys [kv_heads][k_rows/2][64][2], two dimensions of a position side by side (an odd last one beside 0), and values
//             [kv_heads][32][v_pad][2], two positions of a column side by side: the pairs that vdpbf16ps multiplies
//   int8 only: key scales [kv_heads][64], value scales [kv_heads][64]       float; value = q * scale (quantize.h)
//   index keys [index_dim][64]           float when keys are float, else bfloat16
// Positions that were not appended hold anything, but for the values of the odd position after a step's last even one: zeros.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mi::kernels {

inline constexpr int64_t kPageTokens = 64;

enum class KvKind : uint8_t { kF32, kBF16, kI8 };
constexpr int64_t kv_element_bytes(KvKind k) { return k == KvKind::kF32 ? 4 : k == KvKind::kBF16 ? 2 : 1; }

struct KvCache {
  KvKind kind = KvKind::kF32;
  int64_t kv_heads = 0, k_dim = 0, v_dim = 0, index_dim = 0;
  std::byte* data = nullptr;     // not owned; 64-byte aligned

  int64_t v_pad() const { return (v_dim + 15) / 16 * 16; }
  int64_t k_rows() const { return kind == KvKind::kBF16 ? (k_dim + 1) / 2 * 2 : k_dim; }
  KvKind index_kind() const { return kind == KvKind::kF32 ? KvKind::kF32 : KvKind::kBF16; }
  int64_t keys_bytes() const { return kv_heads * k_rows() * kPageTokens * kv_element_bytes(kind); }
  int64_t values_bytes() const { return kv_heads * v_pad() * kPageTokens * kv_element_bytes(kind); }
  int64_t scales_bytes() const { return kind == KvKind::kI8 ? 2 * kv_heads * kPageTokens * 4 : 0; }
  int64_t index_bytes() const { return index_dim * kPageTokens * kv_element_bytes(index_kind()); }
  int64_t page_bytes() const { return keys_bytes() + values_bytes() + scales_bytes() + index_bytes(); }

  std::byte* page(int64_t p) const { return data + p * page_bytes(); }
  std::byte* keys(int64_t p, int64_t head) const { return page(p) + head * (keys_bytes() / kv_heads); }
  std::byte* values(int64_t p, int64_t head) const { return page(p) + keys_bytes() + head * (values_bytes() / kv_heads); }
  float* key_scales(int64_t p, int64_t head) const {
    return reinterpret_cast<float*>(page(p) + keys_bytes() + values_bytes()) + head * kPageTokens;
  }
  float* value_scales(int64_t p, int64_t head) const { return key_scales(p, kv_heads + head); }
  std::byte* index_keys(int64_t p) const { return page(p) + keys_bytes() + values_bytes() + scales_bytes(); }
};

// Consecutive rows of the step that are consecutive positions of one sequence.
struct KvChunk {
  int64_t row = 0, rows = 0;         // first row of the step, number of rows
  int64_t start = 0;                 // position of the first row
  const int32_t* pages = nullptr;    // page of position j: pages[j / 64]; covers start + rows
};
// The part of a chunk that lies in one page.
struct KvSegment {
  int64_t row = 0, rows = 0;
  int32_t page = 0, slot = 0;        // position of the first row inside the page
};
// The step's rows; kept between steps so that its vectors do not allocate.
struct KvStep {
  std::vector<KvChunk> chunks;
  std::vector<KvSegment> segments;

  void clear() {
    chunks.clear();
    segments.clear();
  }
  void add(const KvChunk& c) {
    chunks.push_back(c);
    for (int64_t i = 0; i < c.rows;) {
      const int64_t pos = c.start + i, slot = pos % kPageTokens;
      const int64_t n = c.rows - i < kPageTokens - slot ? c.rows - i : kPageTokens - slot;
      segments.push_back({c.row + i, n, c.pages[pos / kPageTokens], int32_t(slot)});
      i += n;
    }
  }
};

}  // namespace mi::kernels
