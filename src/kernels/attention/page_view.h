#pragma once
// Pages as floats and masks of positions: what attention and the block index share.

#include <algorithm>
#include <cstdint>

#include "kernels/attention/block_kernels.h"
#include "kernels/attention/kv_cache.h"

namespace mi::kernels {

// Bits [lo, hi), 0 <= lo < hi <= 64.
inline uint64_t bit_range(int64_t lo, int64_t hi) { return (~uint64_t(0) >> (64 - (hi - lo))) << lo; }

// First position that token t sees.
inline int64_t first_seen(int64_t t, int64_t window) { return window > 0 ? std::max<int64_t>(0, t - window + 1) : 0; }

// Bits of the positions of block b that token t sees.
inline uint64_t seen_mask(int64_t t, int64_t window, int64_t b) {
  const int64_t lo = std::max<int64_t>(first_seen(t, window) - b * kBlock, 0), hi = std::min<int64_t>(t + 1 - b * kBlock, kBlock);
  return lo < hi ? bit_range(lo, hi) : 0;
}

// The first n positions of a head's keys [k_dim][64], values [64][v_pad] or of the index keys [index_dim][64] as floats: the
// page itself when it holds floats, else widened into scratch.
inline const float* view_block(int stored, bool keys, const void* data, const float* scales, int64_t dim, int64_t n, float* scratch,
                               const hw::CpuFeatures& cpu) {
  if (stored == 0) return static_cast<const float*>(data);
  const StoredBlock b{data, scales, stored};
  if (keys)
    MI_PICK(attn_widen_keys, cpu)(b, dim, n, scratch);
  else
    MI_PICK(attn_widen_values, cpu)(b, dim, n, scratch);
  return scratch;
}
inline int stored_kind(KvKind k) { return k == KvKind::kF32 ? 0 : k == KvKind::kBF16 ? 3 : 2; }
inline const float* view_keys(const KvCache& c, int64_t page, int64_t head, int64_t n, float* scratch, const hw::CpuFeatures& cpu) {
  return view_block(stored_kind(c.kind), true, c.keys(page, head), c.kind == KvKind::kI8 ? c.key_scales(page, head) : nullptr, c.k_rows(), n, scratch,
                    cpu);
}
inline const float* view_values(const KvCache& c, int64_t page, int64_t head, int64_t n, float* scratch, const hw::CpuFeatures& cpu) {
  return view_block(stored_kind(c.kind), false, c.values(page, head), c.kind == KvKind::kI8 ? c.value_scales(page, head) : nullptr, c.v_pad(), n,
                    scratch, cpu);
}
inline const float* view_index_keys(const KvCache& c, int64_t page, int64_t n, float* scratch, const hw::CpuFeatures& cpu) {
  return view_block(c.index_kind() == KvKind::kF32 ? 0 : 1, true, c.index_keys(page), nullptr, c.index_dim, n, scratch, cpu);
}

}  // namespace mi::kernels
