#include <algorithm>
#include <cstring>

#include "kernels/attention/attention.h"
#include "kernels/gemm/gemm.h"
#include "kernels/quantize/quantize.h"
#include "kernels/rows.h"
#include "tensor/dtype.h"

namespace mi::kernels {
namespace {

inline void store(float v, float* p) { *p = v; }
inline void store(float v, uint16_t* p) { *p = to_bf16(v).bits; }

// Rows of `dim` floats become columns slot.. of [dim][64].
template <typename T>
void put_columns(const float* x, int64_t x_stride, int64_t rows, int64_t dim, void* out, int64_t slot) {
  T* to = static_cast<T*>(out) + slot;
  for (int64_t d = 0; d < dim; ++d, to += kPageTokens)
    for (int64_t i = 0; i < rows; ++i) store(row_at(x, x_stride, i)[d], to + i);
}
// Rows become rows slot.. of [64][pad].
void put_rows(const float* x, int64_t x_stride, int64_t rows, int64_t dim, int64_t pad, void* out, int64_t slot) {
  float* to = static_cast<float*>(out) + slot * pad;
  for (int64_t i = 0; i < rows; ++i, to += pad) std::copy_n(row_at(x, x_stride, i), dim, to);
}

// bfloat16 keys: rows of `dim` floats become columns slot.. of [k_rows/2][64][2].
void put_key_pairs(const float* x, int64_t x_stride, int64_t rows, int64_t dim, void* out, int64_t slot) {
  uint32_t* to = static_cast<uint32_t*>(out) + slot;
  for (int64_t d = 0; d < dim; d += 2, to += kPageTokens)
    for (int64_t i = 0; i < rows; ++i) {
      const float* r = row_at(x, x_stride, i) + d;
      to[i] = to_bf16(r[0]).bits | (d + 1 < dim ? uint32_t(to_bf16(r[1]).bits) << 16 : 0);
    }
}
// bfloat16 values: rows become halves of [32][pad][2]. The half after an even last row is read together with it, so it
// becomes 0; a later step writes it.
void put_value_pairs(const float* x, int64_t x_stride, int64_t rows, int64_t dim, int64_t pad, void* out, int64_t slot) {
  uint16_t* to = static_cast<uint16_t*>(out);
  for (int64_t i = 0; i < rows; ++i) {
    const float* r = row_at(x, x_stride, i);
    uint16_t* half = to + (slot + i) / 2 * pad * 2 + (slot + i) % 2;
    for (int64_t d = 0; d < dim; ++d) half[2 * d] = to_bf16(r[d]).bits;
  }
  if ((slot + rows) % 2 == 0) return;
  uint16_t* half = to + (slot + rows) / 2 * pad * 2 + 1;
  for (int64_t d = 0; d < pad; ++d) half[2 * d] = 0;
}

void append_i8(const KvCache& c, const KvSegment& s, int64_t head, const float* k, int64_t k_stride, const float* v, int64_t v_stride,
               char* row, const hw::CpuFeatures& cpu) {
  const int64_t bytes = q8_row_bytes(std::max(c.k_dim, c.v_dim));
  int8_t* keys = reinterpret_cast<int8_t*>(c.keys(s.page, head)) + s.slot;
  int8_t* values = reinterpret_cast<int8_t*>(c.values(s.page, head)) + s.slot * c.v_pad();
  for (int64_t i = 0; i < s.rows; ++i) {
    quantize_rows(row_at(k, k_stride, i), k_stride, 1, c.k_dim, row, bytes, cpu);
    for (int64_t d = 0; d < c.k_dim; ++d) keys[d * kPageTokens + i] = int8_t(row[d]);
    std::memcpy(c.key_scales(s.page, head) + s.slot + i, row + q8_scale_offset(c.k_dim), 4);
    quantize_rows(row_at(v, v_stride, i), v_stride, 1, c.v_dim, row, bytes, cpu);
    std::memcpy(values + i * c.v_pad(), row, size_t(c.v_dim));
    std::memcpy(c.value_scales(s.page, head) + s.slot + i, row + q8_scale_offset(c.v_dim), 4);
  }
}

// f(segment, part) for every segment and part; small steps stay on the calling thread.
template <typename F>
void for_segments(hw::ThreadPool& pool, const KvStep& step, int64_t parts, int64_t cols, F&& f) {
  const int64_t tasks = int64_t(step.segments.size()) * parts;
  int64_t rows = 0;
  for (const KvSegment& s : step.segments) rows += s.rows;
  auto task = [&](int64_t i, int) { f(step.segments[size_t(i / parts)], i % parts); };
  if (rows * cols <= 16384)
    for (int64_t i = 0; i < tasks; ++i) task(i, 0);
  else
    run_tasks(pool, tasks, task);
}

}  // namespace

void kv_append_run(const KvAppendArgs& a, hw::ThreadPool& pool, const hw::CpuFeatures& cpu) {
  const KvCache& c = *a.cache;
  RopeParams one_head = a.rope;
  one_head.heads = 1;
  const int64_t row_bytes = c.k_dim * 4, rotated_bytes = (kPageTokens * row_bytes + 63) / 64 * 64;
  for_segments(pool, *a.step, c.kv_heads, c.kv_heads * (c.k_dim + c.v_dim), [&](const KvSegment& s, int64_t head) {
    const float* k = row_at(a.k, a.k_stride, s.row) + head * c.k_dim;
    const float* v = row_at(a.v, a.v_stride, s.row) + head * c.v_dim;
    int64_t k_stride = a.k_stride;
    char* const scratch = static_cast<char*>(thread_scratch(rotated_bytes + q8_row_bytes(std::max(c.k_dim, c.v_dim))));
    if (a.rope_table) {
      float* rotated = reinterpret_cast<float*>(scratch);
      rope_rows(one_head, {s.rows, k, k_stride, a.positions + s.row, a.rope_table, rotated, row_bytes}, 0, s.rows);
      k = rotated;
      k_stride = row_bytes;
    }
    switch (c.kind) {
      case KvKind::kF32:
        put_columns<float>(k, k_stride, s.rows, c.k_dim, c.keys(s.page, head), s.slot);
        put_rows(v, a.v_stride, s.rows, c.v_dim, c.v_pad(), c.values(s.page, head), s.slot);
        break;
      case KvKind::kBF16:
        put_key_pairs(k, k_stride, s.rows, c.k_dim, c.keys(s.page, head), s.slot);
        put_value_pairs(v, a.v_stride, s.rows, c.v_dim, c.v_pad(), c.values(s.page, head), s.slot);
        break;
      case KvKind::kI8: append_i8(c, s, head, k, k_stride, v, a.v_stride, scratch + rotated_bytes, cpu); break;
    }
  });
}

void index_append_run(const KvCache& c, const KvStep& step, const float* x, int64_t x_stride, hw::ThreadPool& pool) {
  for_segments(pool, step, 1, c.index_dim, [&](const KvSegment& s, int64_t) {
    const float* k = row_at(x, x_stride, s.row);
    if (c.index_kind() == KvKind::kF32)
      put_columns<float>(k, x_stride, s.rows, c.index_dim, c.index_keys(s.page), s.slot);
    else
      put_columns<uint16_t>(k, x_stride, s.rows, c.index_dim, c.index_keys(s.page), s.slot);
  });
}

}  // namespace mi::kernels
