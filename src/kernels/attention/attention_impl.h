// The inner kernels of attention; compiled per ISA. block.h has the contract.

#include "kernels/attention/block.h"
#include "kernels/simd.h"

namespace mi::kernels::MI_ISA {

// The inner loops below keep each lane to itself (a lane is a position, or a column of the values), so the width of a vector
// changes no bit: they use the ISA's own.
#if defined(__AVX512F__)
typedef __m512 N;
enum { kLanes = 16, kTileRows = 4, kTileVectors = 4 };
static inline N n_set(float f) { return _mm512_set1_ps(f); }
static inline N n_load(const float* p) { return _mm512_loadu_ps(p); }
static inline void n_store(float* p, N v) { _mm512_storeu_ps(p, v); }
static inline N n_mul(N a, N b) { return _mm512_mul_ps(a, b); }
static inline N n_fma(N a, N b, N c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__AVX2__)
typedef __m256 N;
enum { kLanes = 8, kTileRows = 4, kTileVectors = 2 };
static inline N n_set(float f) { return _mm256_set1_ps(f); }
static inline N n_load(const float* p) { return _mm256_loadu_ps(p); }
static inline void n_store(float* p, N v) { _mm256_storeu_ps(p, v); }
static inline N n_mul(N a, N b) { return _mm256_mul_ps(a, b); }
static inline N n_fma(N a, N b, N c) { return _mm256_fmadd_ps(a, b, c); }
#else
typedef float N;
enum { kLanes = 1, kTileRows = 1, kTileVectors = 16 };
static inline N n_set(float f) { return f; }
static inline N n_load(const float* p) { return *p; }
static inline void n_store(float* p, N v) { *p = v; }
static inline N n_mul(N a, N b) { return a * b; }
static inline N n_fma(N a, N b, N c) { return s_fma(a, b, c); }
#endif
enum { kTileLanes = kLanes * kTileVectors };

static inline V16 load_i8(const int8_t* p) {
  V16 r;
#if defined(__AVX512F__)
  const __m512 x = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
  memcpy(&r, &x, 64);
#elif defined(__AVX2__)
  const __m256 x = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
  const __m256 y = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))));
  memcpy(&r, &x, 32);
  memcpy((char*)&r + 32, &y, 32);
#else
  for (int i = 0; i < 16; ++i) r[i] = float(p[i]);
#endif
  return r;
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

// s[r][j] = q[r] . k[j] for C vectors of positions.
template <int R, int C>
static inline void scores_tile(const float* q, int64_t dim, const float* keys, float* s) {
  N acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = n_set(0);
  for (int64_t d = 0; d < dim; ++d) {
    N k[C];
    for (int c = 0; c < C; ++c) k[c] = n_load(keys + d * kBlock + kLanes * c);
    for (int r = 0; r < R; ++r) {
      const N x = n_set(q[r * dim + d]);
      for (int c = 0; c < C; ++c) acc[r][c] = n_fma(x, k[c], acc[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) n_store(s + r * kBlock + kLanes * c, acc[r][c]);
}
// The same for the first n positions, a multiple of 16.
template <int R>
static inline void scores(const float* q, int64_t dim, const float* keys, int64_t n, float* s) {
  int64_t j = 0;
  for (; j + kTileLanes <= n; j += kTileLanes) scores_tile<R, kTileVectors>(q, dim, keys + j, s + j);
  for (; j < n; j += kLanes) scores_tile<R, 1>(q, dim, keys + j, s + j);
}

// Scaled and masked scores of one row, in place, -inf where masked; returns the largest. Whole vectors up to n.
static inline float mask_scores(float* s, uint64_t mask, int64_t n, float scale, float softcap) {
  V16 top = v_set(-__builtin_inff());
  for (int64_t j = 0; j < n; j += 16) {
    V16 v = v_load(s + j) * v_set(scale);
    if (softcap > 0) v = v_tanh(v / v_set(softcap)) * v_set(softcap);
    const uint32_t bits = uint32_t(mask >> j) & 0xffff;
    if (bits != 0xffff) {
      float t[16];
      v_store(t, v);
      for (int i = 0; i < 16; ++i) t[i] = (bits >> i) & 1 ? t[i] : -__builtin_inff();
      v = v_load(t);
    }
    v_store(s + j, v);
    top = v_max(v, top);
  }
  return v_max_lane(top);
}

// Masked scores to weights exp(s - base), in place; returns their sum.
static inline float weights(float* s, int64_t n, float base) {
  V16 x[kBlock / 16];
  for (int c = 0; c < kBlock / 16; ++c) {
    x[c] = v_zero();
    if (16 * c >= n) continue;
    x[c] = v_exp(v_load(s + 16 * c) - v_set(base));
    v_store(s + 16 * c, x[c]);
  }
  return v_sum((x[0] + x[1]) + (x[2] + x[3]));
}

// o = o * factor + sum over positions of p * v, for C vectors of columns.
template <int R, int C>
static inline void weigh_tile(const float* p, const float* factor, const float* values, int64_t v_pad, int64_t begin, int64_t end, float* o) {
  N acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = n_mul(n_load(o + r * v_pad + kLanes * c), n_set(factor[r]));
  for (int64_t j = begin; j < end; ++j) {
    N v[C];
    for (int c = 0; c < C; ++c) v[c] = n_load(values + j * v_pad + kLanes * c);
    for (int r = 0; r < R; ++r) {
      const N w = n_set(p[r * kBlock + j]);
      for (int c = 0; c < C; ++c) acc[r][c] = n_fma(w, v[c], acc[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) n_store(o + r * v_pad + kLanes * c, acc[r][c]);
}

template <int R>
static inline void block_tile(const BlockArgs& a, int64_t row) {
  uint64_t any = 0;
  for (int r = 0; r < R; ++r) any |= a.masks[row + r];
  if (any == 0) return;
  const int64_t begin = __builtin_ctzll(any), end = 64 - __builtin_clzll(any);
  const int64_t n = (end + 15) / 16 * 16;
  float s[R * kBlock];
  scores<R>(a.q + row * a.dim, a.dim, a.keys, n, s);

  float* m = a.state.m + row;
  float* l = a.state.l + row;
  float base[R], factor[16] = {};
  for (int r = 0; r < R; ++r) {
    const float top = mask_scores(s + r * kBlock, a.masks[row + r], n, a.scale, a.softcap);
    const float m_new = top > m[r] ? top : m[r];
    // Nothing seen yet (or NaN alone): subtracting 0 keeps the weights at 0.
    base[r] = m_new == -__builtin_inff() ? 0.0f : m_new;
    factor[r] = m[r] - base[r];
    m[r] = m_new;
  }
  v_store(factor, v_exp(v_load(factor)));
  for (int r = 0; r < R; ++r) l[r] = l[r] * factor[r] + weights(s + r * kBlock, n, base[r]);

  float* o = a.state.o + row * a.v_pad;
  int64_t c = 0;
  for (; c + kTileLanes <= a.v_pad; c += kTileLanes) weigh_tile<R, kTileVectors>(s, factor, a.values + c, a.v_pad, begin, end, o + c);
  for (; c < a.v_pad; c += kLanes) weigh_tile<R, 1>(s, factor, a.values + c, a.v_pad, begin, end, o + c);
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
  float s[R * kBlock];
  scores<R>(q, dim, keys, (end + 15) / 16 * 16, s);
  for (int r = 0; r < R; ++r) {
    float* b = best + r * stride;
    for (int64_t j = 0; j < end;) {
      const int64_t at = (first + j) / block;
      const int64_t stop = (at + 1) * block - first < end ? (at + 1) * block - first : end;
      float top = b[at - first / block];
      for (; j < stop; ++j)
        if ((masks[r] >> j) & 1) top = s[r * kBlock + j] > top ? s[r * kBlock + j] : top;
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
