// The inner kernels of attention; compiled per ISA. block.h has the contract.

#include "kernels/attention/block.h"
#include "kernels/simd.h"

namespace mi::kernels::MI_ISA {

// Rows and vectors of sixteen columns that one tile keeps in registers.
#if defined(__AVX512F__)
enum { kTileRows = 4, kTileVectors = 4 };
#else
enum { kTileRows = 2, kTileVectors = 2 };
#endif

typedef int8_t B16 __attribute__((vector_size(16)));

static inline V16 load_i8(const int8_t* p) {
  B16 b;
  memcpy(&b, p, 16);
  return __builtin_convertvector(b, V16);
}

void attn_widen_keys(const StoredBlock& b, int64_t dim, int64_t n, float* out) {
  for (int64_t j = 0; j < n; j += 16) {
    if (b.kind == 1) {
      const uint16_t* p = static_cast<const uint16_t*>(b.data) + j;
      for (int64_t d = 0; d < dim; ++d) v_store(out + d * kBlock + j, v_load_bf16(p + d * kBlock));
    } else {
      const int8_t* p = static_cast<const int8_t*>(b.data) + j;
      const V16 s = v_load(b.scales + j);
      for (int64_t d = 0; d < dim; ++d) v_store(out + d * kBlock + j, load_i8(p + d * kBlock) * s);
    }
  }
}

void attn_widen_values(const StoredBlock& b, int64_t v_pad, int64_t n, float* out) {
  for (int64_t j = 0; j < n; ++j) {
    if (b.kind == 1) {
      const uint16_t* p = static_cast<const uint16_t*>(b.data) + j * v_pad;
      for (int64_t d = 0; d < v_pad; d += 16) v_store(out + j * v_pad + d, v_load_bf16(p + d));
    } else {
      const int8_t* p = static_cast<const int8_t*>(b.data) + j * v_pad;
      const V16 s = v_set(b.scales[j]);
      for (int64_t d = 0; d < v_pad; d += 16) v_store(out + j * v_pad + d, load_i8(p + d) * s);
    }
  }
}

// s[R][64] = q . k for the first n positions (a multiple of 16).
template <int R>
static inline void scores(const float* q, int64_t dim, const float* keys, int64_t n, float (*s)[kBlock]) {
  int64_t j = 0;
  for (; j + 16 * kTileVectors <= n; j += 16 * kTileVectors) {
    V16 acc[R][kTileVectors];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < kTileVectors; ++c) acc[r][c] = v_zero();
    for (int64_t d = 0; d < dim; ++d) {
      V16 k[kTileVectors];
      for (int c = 0; c < kTileVectors; ++c) k[c] = v_load(keys + d * kBlock + j + 16 * c);
      for (int r = 0; r < R; ++r) {
        const V16 x = v_set(q[r * dim + d]);
        for (int c = 0; c < kTileVectors; ++c) acc[r][c] = v_fma(x, k[c], acc[r][c]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < kTileVectors; ++c) v_store(s[r] + j + 16 * c, acc[r][c]);
  }
  for (; j < n; j += 16) {
    V16 acc[R];
    for (int r = 0; r < R; ++r) acc[r] = v_zero();
    for (int64_t d = 0; d < dim; ++d) {
      const V16 k = v_load(keys + d * kBlock + j);
      for (int r = 0; r < R; ++r) acc[r] = v_fma(v_set(q[r * dim + d]), k, acc[r]);
    }
    for (int r = 0; r < R; ++r) v_store(s[r] + j, acc[r]);
  }
}

// Scores of one row to weights, in place; masked and unwritten positions become 0. Returns the factor of what was summed
// before.
static inline float softmax_step(float* s, uint64_t mask, int64_t n, float scale, float softcap, float* m, float* l) {
  if (mask == 0) {
    for (int64_t j = 0; j < n; ++j) s[j] = 0;
    return 1.0f;
  }
  const V16 neg_inf = v_set(-__builtin_inff());
  V16 x[kBlock / 16];
  V16 top = neg_inf;
  for (int c = 0; c < kBlock / 16; ++c) {
    x[c] = neg_inf;
    if (16 * c >= n) continue;
    V16 v = v_load(s + 16 * c) * v_set(scale);
    if (softcap > 0) v = v_tanh(v / v_set(softcap)) * v_set(softcap);
    const uint32_t bits = uint32_t(mask >> (16 * c)) & 0xffff;
    if (bits != 0xffff) {
      float t[16];
      v_store(t, v);
      for (int i = 0; i < 16; ++i) t[i] = (bits >> i) & 1 ? t[i] : -__builtin_inff();
      v = v_load(t);
    }
    x[c] = v;
    top = v_max(v, top);
  }
  const float m_new = v_max_lane(v_max(top, v_set(*m)));
  // All scores -inf (or NaN): subtracting 0 keeps them at weight 0.
  const float base = m_new == -__builtin_inff() ? 0.0f : m_new;
  const float factor = s_exp(*m - base);
  for (int c = 0; c < kBlock / 16; ++c) {
    x[c] = v_exp(x[c] - v_set(base));
    if (16 * c < n) v_store(s + 16 * c, x[c]);
  }
  const float sum = v_sum((x[0] + x[1]) + (x[2] + x[3]));
  *l = *l * factor + sum;
  *m = m_new;
  return factor;
}

template <int R, int C>
static inline void weigh(const float (*p)[kBlock], const float* factor, const float* values, int64_t v_pad, int64_t begin, int64_t end,
                         float* o) {
  V16 acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = v_load(o + r * v_pad + 16 * c) * v_set(factor[r]);
  for (int64_t j = begin; j < end; ++j) {
    V16 v[C];
    for (int c = 0; c < C; ++c) v[c] = v_load(values + j * v_pad + 16 * c);
    for (int r = 0; r < R; ++r) {
      const V16 w = v_set(p[r][j]);
      for (int c = 0; c < C; ++c) acc[r][c] = v_fma(w, v[c], acc[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) v_store(o + r * v_pad + 16 * c, acc[r][c]);
}

template <int R>
static inline void block_tile(const BlockArgs& a, int64_t row) {
  uint64_t any = 0;
  for (int r = 0; r < R; ++r) any |= a.masks[row + r];
  if (any == 0) return;
  const int64_t begin = __builtin_ctzll(any), end = 64 - __builtin_clzll(any);
  const int64_t n = (end + 15) / 16 * 16;
  float s[R][kBlock];
  float factor[R];
  scores<R>(a.q + row * a.dim, a.dim, a.keys, n, s);
  for (int r = 0; r < R; ++r)
    factor[r] = softmax_step(s[r], a.masks[row + r], n, a.scale, a.softcap, a.state.m + row + r, a.state.l + row + r);
  float* o = a.state.o + row * a.v_pad;
  int64_t c = 0;
  for (; c + 16 * kTileVectors <= a.v_pad; c += 16 * kTileVectors)
    weigh<R, kTileVectors>(s, factor, a.values + c, a.v_pad, begin, end, o + c);
  for (; c < a.v_pad; c += 16) weigh<R, 1>(s, factor, a.values + c, a.v_pad, begin, end, o + c);
}

void attn_block(const BlockArgs& a) {
  int64_t row = 0;
  for (; row + kTileRows <= a.rows; row += kTileRows) block_tile<kTileRows>(a, row);
  for (; row < a.rows; ++row) block_tile<1>(a, row);
}

void attn_fold(int64_t rows, int64_t v_pad, const SoftmaxState& acc, const SoftmaxState& part) {
  for (int64_t r = 0; r < rows; ++r) {
    const float top = part.m[r] > acc.m[r] ? part.m[r] : acc.m[r];
    if (top == -__builtin_inff()) continue;
    const float a = s_exp(acc.m[r] - top), b = s_exp(part.m[r] - top);
    acc.m[r] = top;
    acc.l[r] = acc.l[r] * a + part.l[r] * b;
    float* o = acc.o + r * v_pad;
    const float* x = part.o + r * v_pad;
    for (int64_t c = 0; c < v_pad; c += 16) v_store(o + c, v_fma(v_load(x + c), v_set(b), v_load(o + c) * v_set(a)));
  }
}

void attn_finish(int64_t rows, int64_t v_dim, int64_t v_pad, const SoftmaxState& s, const float* sinks, float* const* out_rows) {
  for (int64_t r = 0; r < rows; ++r) {
    float top = s.m[r], l = s.l[r], factor = 1.0f;
    if (sinks) {
      top = sinks[r] > top ? sinks[r] : top;
      factor = s_exp(s.m[r] - top);
      l = l * factor + s_exp(sinks[r] - top);
    }
    factor = l > 0 ? factor / l : 0.0f;
    const float* o = s.o + r * v_pad;
    // + 0 turns -0 into 0: whether a product underflowed to -0 depends on how rows were put into tiles.
    for (int64_t c = 0; c < v_dim; c += 16) {
      const V16 y = v_load(o + c) * v_set(factor) + v_zero();
      if (v_dim - c >= 16)
        v_store(out_rows[r] + c, y);
      else
        v_store_n(out_rows[r] + c, y, v_dim - c);
    }
  }
}

template <int R>
static inline void index_tile(const float* q, int64_t dim, const float* keys, const uint64_t* masks, int64_t first, int64_t block,
                              float* best, int64_t stride) {
  uint64_t any = 0;
  for (int r = 0; r < R; ++r) any |= masks[r];
  if (any == 0) return;
  const int64_t end = 64 - __builtin_clzll(any);
  float s[R][kBlock];
  scores<R>(q, dim, keys, (end + 15) / 16 * 16, s);
  for (int r = 0; r < R; ++r) {
    float* b = best + r * stride;
    for (int64_t j = 0; j < end;) {
      const int64_t at = (first + j) / block;
      const int64_t stop = (at + 1) * block - first < end ? (at + 1) * block - first : end;
      float top = b[at - first / block];
      for (; j < stop; ++j)
        if ((masks[r] >> j) & 1) top = s[r][j] > top ? s[r][j] : top;
      b[at - first / block] = top;
    }
  }
}

void index_block(int64_t rows, const float* q, int64_t dim, const float* keys, const uint64_t* masks, int64_t first, int64_t block,
                 float* best, int64_t stride) {
  int64_t r = 0;
  for (; r + kTileRows <= rows; r += kTileRows)
    index_tile<kTileRows>(q + r * dim, dim, keys, masks + r, first, block, best + r * stride, stride);
  for (; r < rows; ++r) index_tile<1>(q + r * dim, dim, keys, masks + r, first, block, best + r * stride, stride);
}

}  // namespace mi::kernels::MI_ISA
