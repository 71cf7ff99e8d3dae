// The inner kernels of attention; compiled per ISA. block.h has the contract.

#include "kernels/attention/softmax_tile.h"

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
static inline N n_add(N a, N b) { return _mm512_add_ps(a, b); }
static inline N n_fma(N a, N b, N c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__AVX2__)
typedef __m256 N;
enum { kLanes = 8, kTileRows = 4, kTileVectors = 2 };
static inline N n_set(float f) { return _mm256_set1_ps(f); }
static inline N n_load(const float* p) { return _mm256_loadu_ps(p); }
static inline void n_store(float* p, N v) { _mm256_storeu_ps(p, v); }
static inline N n_mul(N a, N b) { return _mm256_mul_ps(a, b); }
static inline N n_add(N a, N b) { return _mm256_add_ps(a, b); }
static inline N n_fma(N a, N b, N c) { return _mm256_fmadd_ps(a, b, c); }
#else
typedef float N;
enum { kLanes = 1, kTileRows = 1, kTileVectors = 16 };
static inline N n_set(float f) { return f; }
static inline N n_load(const float* p) { return *p; }
static inline void n_store(float* p, N v) { *p = v; }
static inline N n_mul(N a, N b) { return a * b; }
static inline N n_add(N a, N b) { return a + b; }
static inline N n_fma(N a, N b, N c) { return s_fma(a, b, c); }
#endif

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

// 16 pairs of bfloat16: their first and second numbers.
static inline V16 load_first(const uint16_t* p) {
  I16 x;
  memcpy(&x, p, 64);
  return (V16)(x << 16);
}
static inline V16 load_second(const uint16_t* p) {
  I16 x;
  memcpy(&x, p, 64);
  return (V16)(x & int32_t(0xffff0000));
}

void attn_widen_keys(const StoredBlock& b, int64_t dim, int64_t n, float* out) {
  for (int64_t j = 0; j < n; j += 16) {
    if (b.kind == 3) {
      const uint16_t* p = static_cast<const uint16_t*>(b.data) + 2 * j;
      for (int64_t d = 0; d < dim; d += 2, p += 2 * kBlock) {
        v_store(out + d * kBlock + j, load_first(p));
        v_store(out + (d + 1) * kBlock + j, load_second(p));
      }
    } else if (b.kind == 1) {
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
    if (b.kind == 3) {
      const uint16_t* p = static_cast<const uint16_t*>(b.data) + j / 2 * v_pad * 2;
      for (int64_t d = 0; d < v_pad; d += 16) v_store(out + j * v_pad + d, j % 2 == 0 ? load_first(p + 2 * d) : load_second(p + 2 * d));
    } else {
      const int8_t* p = static_cast<const int8_t*>(b.data) + j * v_pad;
      const V16 s = v_set(b.scales[j]);
      for (int64_t d = 0; d < v_pad; d += 16) v_store(out + j * v_pad + d, load_i8(p + d) * s);
    }
  }
}

// The place of a chain's i-th term: ascending, or pair by pair, the second of each first.
template <SumOrder kOrder>
static inline int64_t chain(int64_t i) {
  return kOrder == SumOrder::kPairs ? i ^ 1 : i;
}
enum { kGroup = 32 };  // of kTiles

// acc[r][c] += x[r] . y[c] over [begin, end), in the order; term(i, y) loads C vectors y of the i-th term, x(r, i) its other factor.
template <SumOrder kOrder, int R, int C, typename X, typename Y>
static inline void add_products(N (&acc)[R][C], int64_t begin, int64_t end, X x, Y load) {
  const auto add = [&](N(&sum)[R][C], int64_t i) {
    N y[C];
    load(i, y);
    for (int r = 0; r < R; ++r) {
      const N w = n_set(x(r, i));
      for (int c = 0; c < C; ++c) sum[r][c] = n_fma(w, y[c], sum[r][c]);
    }
  };
  if constexpr (kOrder != SumOrder::kTiles) {
    for (int64_t i = begin; i < end; ++i) add(acc, chain<kOrder>(i));
  } else {
    for (int64_t i = begin; i < end;) {
      const int64_t group = i / kGroup * kGroup + kGroup, stop = group < end ? group : end;
      N even[R][C], odd[R][C];
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) even[r][c] = odd[r][c] = n_set(0);
      for (; i < stop; i += 2) {
        add(even, i);
        add(odd, i + 1);
      }
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) acc[r][c] = n_add(acc[r][c], n_add(even[r][c], odd[r][c]));
    }
  }
}

// s[r][j] = q[r] . k[j] for C vectors of positions.
template <SumOrder kOrder, int R, int C>
static inline void scores_tile(const float* q, int64_t dim, const float* keys, float* s) {
  N acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = n_set(0);
  add_products<kOrder, R, C>(
      acc, 0, dim, [&](int r, int64_t d) { return q[r * dim + d]; },
      [&](int64_t d, N* k) {
        for (int c = 0; c < C; ++c) k[c] = n_load(keys + d * kBlock + kLanes * c);
      });
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) n_store(s + r * kBlock + kLanes * c, acc[r][c]);
}
// kTiles has three sums for one.
template <SumOrder kOrder>
constexpr int tile_vectors() {
  return kOrder == SumOrder::kTiles && kLanes > 1 ? kTileVectors / 2 : kTileVectors;
}
// The same for the first n positions, a multiple of 16.
template <SumOrder kOrder, int R>
static inline void scores(const float* q, int64_t dim, const float* keys, int64_t n, float* s) {
  constexpr int kVectors = tile_vectors<kOrder>();
  int64_t j = 0;
  for (; j + kLanes * kVectors <= n; j += kLanes * kVectors) scores_tile<kOrder, R, kVectors>(q, dim, keys + j, s + j);
  for (; j < n; j += kLanes) scores_tile<kOrder, R, 1>(q, dim, keys + j, s + j);
}

// Numbers in [0, 1] to bfloat16 and back.
static inline V16 round_weights(V16 p) {
  const U16 x = (U16)p;
  return (V16)((x + (0x7fff + ((x >> 16) & 1))) & 0xffff0000u);
}

// o = o * factor + sum over positions of p * v, for C vectors of columns.
template <SumOrder kOrder, int R, int C>
static inline void weigh_tile(const float* p, const float* factor, const float* values, int64_t v_pad, int64_t begin, int64_t end, float* o) {
  N acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = n_mul(n_load(o + r * v_pad + kLanes * c), n_set(factor[r]));
  add_products<kOrder, R, C>(
      acc, begin, end, [&](int r, int64_t j) { return p[r * kBlock + j]; },
      [&](int64_t j, N* v) {
        for (int c = 0; c < C; ++c) v[c] = n_load(values + j * v_pad + kLanes * c);
      });
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) n_store(o + r * v_pad + kLanes * c, acc[r][c]);
}

template <SumOrder kOrder, int R>
static inline void block_tile(const BlockArgs& a, int64_t row) {
  constexpr int kVectors = tile_vectors<kOrder>();
  Span span = span_of<R>(a.masks + row);
  if (span.n == 0) return;
  float s[R * kBlock], factor[16];
  scores<kOrder, R>(a.q + row * a.dim, a.dim, a.keys, span.n, s);
  softmax_tile<R>(a, row, span.n, s, factor);
  if (kOrder != SumOrder::kAscending) {
    for (int r = 0; r < R; ++r)
      for (int64_t j = 0; j < span.n; j += 16) v_store(s + r * kBlock + j, round_weights(v_load(s + r * kBlock + j)));
    span.begin = span.begin / 2 * 2;
    span.end = (span.end + 1) / 2 * 2;
  }
  float* o = a.state.o + row * a.v_pad;
  int64_t c = 0;
  for (; c + kLanes * kVectors <= a.v_pad; c += kLanes * kVectors)
    weigh_tile<kOrder, R, kVectors>(s, factor, a.values + c, a.v_pad, span.begin, span.end, o + c);
  for (; c < a.v_pad; c += kLanes) weigh_tile<kOrder, R, 1>(s, factor, a.values + c, a.v_pad, span.begin, span.end, o + c);
}

template <SumOrder kOrder>
static inline void block_rows(const BlockArgs& a) {
  int64_t row = 0;
  for (; row + kTileRows <= a.rows; row += kTileRows) block_tile<kOrder, kTileRows>(a, row);
  for (; row < a.rows; ++row) block_tile<kOrder, 1>(a, row);
}

void attn_block(const BlockArgs& a) {
  switch (a.order) {
    case SumOrder::kAscending: return block_rows<SumOrder::kAscending>(a);
    case SumOrder::kPairs: return block_rows<SumOrder::kPairs>(a);
    case SumOrder::kTiles: return block_rows<SumOrder::kTiles>(a);
  }
}

static inline void store_low_halves(uint16_t* p, I16 v) {
#if defined(__AVX512F__)
  __m512i x;
  memcpy(&x, &v, 64);
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(x));
#else
  for (int i = 0; i < 16; ++i) p[i] = uint16_t(v[i]);
#endif
}

void attn_round_row(const float* x, int64_t n, int64_t n_even, float* out, uint16_t* out_bf16) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const I16 bits = v_to_bf16(v_load(x + i));
    if (out) v_store(out + i, (V16)(bits << 16));
    if (out_bf16) store_low_halves(out_bf16 + i, bits);
  }
  if (i == n_even) return;
  const I16 bits = v_to_bf16(v_load_n(x + i, n - i));
  if (out) v_store_n(out + i, (V16)(bits << 16), n_even - i);
  if (out_bf16)
    for (int64_t j = i; j < n_even; ++j) out_bf16[j] = uint16_t(bits[j - i]);
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
  scores<SumOrder::kAscending, R>(q, dim, keys, (end + 15) / 16 * 16, s);
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
