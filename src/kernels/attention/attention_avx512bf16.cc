// Attention's block step by vdpbf16ps, which multiplies two pairs of bfloat16 and adds both products: twice the rate of
// fma on floats, and nothing to widen.

#include "kernels/attention/softmax_tile.h"

namespace mi::kernels::avx512bf16 {

using namespace avx512;

namespace {

constexpr int kRows = 4, kVectors = 4;  // of a tile: 16 sums, 4 vectors of the cache, and one that is broadcast

inline __m512 dot(__m512 sum, uint32_t pair, __m512i pairs) {
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(int32_t(pair)), (__m512bh)pairs);
}
inline uint32_t load_pair(const uint16_t* p) {
  uint32_t u;
  memcpy(&u, p, 4);
  return u;
}

// s[r][j] = q[r] . k[j] for C vectors of positions. keys: [dim/2][64][2].
template <int R, int C>
inline void scores_tile(const uint16_t* q, int64_t dim, const uint16_t* keys, float* s) {
  __m512 acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = _mm512_setzero_ps();
#pragma GCC unroll 2
  for (int64_t d = 0; d < dim; d += 2, keys += 2 * kBlock) {
    __m512i k[C];
    for (int c = 0; c < C; ++c) k[c] = _mm512_loadu_si512(keys + 32 * c);
    for (int r = 0; r < R; ++r) {
      const uint32_t x = load_pair(q + r * dim + d);
      for (int c = 0; c < C; ++c) acc[r][c] = dot(acc[r][c], x, k[c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) _mm512_storeu_ps(s + r * kBlock + 16 * c, acc[r][c]);
}

// o = o * factor + sum over positions of p * v, for C vectors of columns. values: [32][v_pad][2], begin and end even.
template <int R, int C>
inline void weigh_tile(const uint16_t* p, const float* factor, const uint16_t* values, int64_t v_pad, int64_t begin,
                       int64_t end, float* o) {
  __m512 acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      acc[r][c] = _mm512_mul_ps(_mm512_loadu_ps(o + r * v_pad + 16 * c), _mm512_set1_ps(factor[r]));
#pragma GCC unroll 2
  for (int64_t j = begin; j < end; j += 2) {
    __m512i v[C];
    for (int c = 0; c < C; ++c) v[c] = _mm512_loadu_si512(values + j * v_pad + 32 * c);
    for (int r = 0; r < R; ++r) {
      const uint32_t w = load_pair(p + r * kBlock + j);
      for (int c = 0; c < C; ++c) acc[r][c] = dot(acc[r][c], w, v[c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) _mm512_storeu_ps(o + r * v_pad + 16 * c, acc[r][c]);
}

// The weights of a few tiles of rows. First all their scores, then all their sums: the block's keys, then its values,
// stay in the L1 cache meanwhile (16 KB each with 128 dimensions).
constexpr int64_t kPass = 32;
struct Weights {
  uint16_t p[kPass * kBlock];
  float factor[kPass + 16];
  Span span[kPass];
};

template <int R>
inline void weights_tile(const BlockArgs& a, int64_t first, int64_t i, Weights& w) {
  const int64_t row = first + i;
  const Span span = w.span[i] = span_of<R>(a.masks + row);
  if (span.n == 0) return;
  float s[R * kBlock];
  const uint16_t* q = a.q_bf16 + row * a.dim;
  if (span.n == kBlock)
    scores_tile<R, kVectors>(q, a.dim, a.keys_bf16, s);
  else
    for (int64_t j = 0; j < span.n; j += 16) scores_tile<R, 1>(q, a.dim, a.keys_bf16 + 2 * j, s + j);
  softmax_tile<R>(a, row, span.n, s, w.factor + i);
  for (int r = 0; r < R; ++r)
    for (int64_t j = 0; j < span.n; j += 16)
      _mm256_storeu_si256((__m256i*)(w.p + (i + r) * kBlock + j),
                          (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(s + r * kBlock + j)));
}

template <int R>
inline void sums_tile(const BlockArgs& a, int64_t first, int64_t i, const Weights& w) {
  const Span& span = w.span[i];
  if (span.n == 0) return;
  const int64_t begin = span.begin / 2 * 2, end = (span.end + 1) / 2 * 2;
  const uint16_t* p = w.p + i * kBlock;
  const float* factor = w.factor + i;
  float* o = a.state.o + (first + i) * a.v_pad;
  int64_t c = 0;
  for (; c + 16 * kVectors <= a.v_pad; c += 16 * kVectors)
    weigh_tile<R, kVectors>(p, factor, a.values_bf16 + 2 * c, a.v_pad, begin, end, o + c);
  for (; c < a.v_pad; c += 16) weigh_tile<R, 1>(p, factor, a.values_bf16 + 2 * c, a.v_pad, begin, end, o + c);
}

}  // namespace

void attn_block(const BlockArgs& a) {
  Weights w;
  for (int64_t first = 0; first < a.rows; first += kPass) {
    const int64_t n = a.rows - first < kPass ? a.rows - first : kPass, tiled = n / kRows * kRows;
    for (int64_t i = 0; i < tiled; i += kRows) weights_tile<kRows>(a, first, i, w);
    for (int64_t i = tiled; i < n; ++i) weights_tile<1>(a, first, i, w);
    for (int64_t i = 0; i < tiled; i += kRows) sums_tile<kRows>(a, first, i, w);
    for (int64_t i = tiled; i < n; ++i) sums_tile<1>(a, first, i, w);
  }
}

bool dot_is_two_fma() {
  // Exponents near those of the other operand, so that roundings differ from those of any other order, and near the
  // smallest.
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);
  uint64_t state = 1;
  const auto next = [&] { return uint32_t((state = state * 6364136223846793005u + 1442695040888963407u) >> 33); };
  bool same = true;
  for (int i = 0; i < 4096; ++i) {
    const uint32_t centre = i % 2 == 0 ? 127 : 60;  // 2^-67 squared is denormal
    uint16_t x[32], y[32];
    uint32_t c[16];
    for (int j = 0; j < 32; ++j) {
      x[j] = uint16_t(next() % 2 << 15 | (centre - 4 + next() % 8) << 7 | next() % 128);
      y[j] = uint16_t(next() % 2 << 15 | (centre - 4 + next() % 8) << 7 | next() % 128);
    }
    for (int j = 0; j < 16; ++j)
      c[j] = next() % 2 << 31 | (centre == 127 ? 119 + next() % 16 : next() % 8) << 23 | next() % 0x800000;
    const __m512i a = _mm512_loadu_si512(x), b = _mm512_loadu_si512(y);
    const __m512 sum = _mm512_loadu_ps(c);
    const __m512i high = _mm512_set1_epi32(int32_t(0xffff0000));
    const auto first = [](__m512i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); };
    const auto second = [&](__m512i v) { return _mm512_castsi512_ps(_mm512_and_si512(v, high)); };
    const __m512 expected = _mm512_fmadd_ps(first(a), first(b), _mm512_fmadd_ps(second(a), second(b), sum));
    const __m512 got = _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
    same &= _mm512_cmpeq_epi32_mask(_mm512_castps_si512(expected), _mm512_castps_si512(got)) == 0xffff;
  }
  _mm_setcsr(before);
  return same;
}

}  // namespace mi::kernels::avx512bf16
