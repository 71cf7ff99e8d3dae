// Attention's block step by tdpbf16ps: 16 rows by 16 positions (or columns) by 32 numbers in an instruction.
// Keys [dim/2][64][2] and values [32][v_pad][2] are tiles as they are stored.

#include "kernels/amx.h"
#include "kernels/attention/softmax_tile.h"

namespace mi::kernels::amx {

using namespace avx512;

namespace {

using Tiles = AmxBF16;

constexpr int64_t kGroup = 32;        // numbers of a row in a tile
constexpr int64_t kRows = 16;
constexpr int64_t kKeyTile = kGroup * kBlock;

// s[r][j] = q[r] . k[j] for 16 * C positions. Tiles 0.. are sums, 4 is q, 6 and 7 are keys in turn.
template <int C, int c = 0>
inline void begin_sums() {
  if constexpr (c < C) {
    Tiles::zero<c>();
    begin_sums<C, c + 1>();
  }
}
template <int C, int A, int c = 0>
inline void add_products(const uint16_t* b, int64_t stride) {
  if constexpr (c < C) {
    Tiles::load<6 + c % 2>(b + 2 * 16 * c, stride);
    Tiles::dot<c, A, 6 + c % 2>();
    add_products<C, A, c + 1>(b, stride);
  }
}
template <int C, int c = 0>
inline void load_sums(const float* s, int64_t stride) {
  if constexpr (c < C) {
    Tiles::load<c>(s + 16 * c, stride);
    load_sums<C, c + 1>(s, stride);
  }
}
template <int C, int c = 0>
inline void store_sums(float* s, int64_t stride) {
  if constexpr (c < C) {
    Tiles::store<c>(s + 16 * c, stride);
    store_sums<C, c + 1>(s, stride);
  }
}
template <int C>
inline void scores_tile(const uint16_t* q, int64_t q_bytes, const uint16_t* keys, int64_t groups, const uint16_t* last, float* s) {
  begin_sums<C>();
  for (int64_t g = 0; g + 1 < groups; ++g, q += kGroup, keys += kKeyTile) {
    Tiles::load<4>(q, q_bytes);
    add_products<C, 4>(keys, 4 * kBlock);
  }
  Tiles::load<4>(q, q_bytes);
  add_products<C, 4>(last, 4 * kBlock);
  store_sums<C>(s, 4 * kBlock);
}

// Lane r = x[r][0] (op) .. (op) x[r][15], in v_sum's tree.
template <typename Op>
inline __m512 reduce_rows(const __m512* x, Op op) {
  const auto quarter = [&](int r) {  // rows r, r + 4, r + 8, r + 12: four lanes of each
    const __m512 ab = op(_mm512_shuffle_f32x4(x[r], x[r + 4], 0x44), _mm512_shuffle_f32x4(x[r], x[r + 4], 0xee));
    const __m512 cd = op(_mm512_shuffle_f32x4(x[r + 8], x[r + 12], 0x44), _mm512_shuffle_f32x4(x[r + 8], x[r + 12], 0xee));
    return op(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  };
  const auto half = [&](int r) {     // rows r and r + 1 of each: two lanes
    const __m512d a = _mm512_castps_pd(quarter(r)), b = _mm512_castps_pd(quarter(r + 1));
    return op(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  };
  const __m512 a = half(0), b = half(2);
  return op(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

// A tile of rows between the two products: softmax_tile for up to 16 rows at once, with the same bits.
struct Weights {
  alignas(64) float s[kRows * kBlock];
  alignas(64) uint16_t p[kRows * kBlock];
  alignas(64) float factor[kRows], base[kRows];
  Span span;
};

template <bool kWhole>
inline void softmax_rows(const BlockArgs& a, int64_t row, int64_t rows, Weights& w) {
  const __mmask16 real = __mmask16(0xffffu >> (kRows - rows));
  // Columns that the sums' groups of 32 read.
  const int64_t begin = w.span.begin / kGroup * kGroup, end = (w.span.end + kGroup - 1) / kGroup * kGroup;
  const __m512 nothing = _mm512_set1_ps(-__builtin_inff()), scale = _mm512_set1_ps(a.scale);
  __m512 x[kRows];
  for (int64_t r = rows; r < kRows; ++r) x[r] = nothing;
  for (int64_t r = 0; r < rows; ++r) {
    float* s = w.s + r * kBlock;
    __m512 top = nothing;
    if (kWhole && a.softcap == 0) {
      for (int j = 0; j < kBlock; j += 16) {
        const __m512 v = _mm512_mul_ps(_mm512_load_ps(s + j), scale);
        _mm512_store_ps(s + j, v);
        top = _mm512_max_ps(v, top);
      }
      x[r] = top;
    } else {
      const uint64_t mask = a.masks[row + r];
      for (int64_t j = begin; j < end; j += 16) {
        const V16 v = scaled_scores(s + j, mask >> j, a.scale, a.softcap);
        v_store(s + j, v);
        top = _mm512_max_ps((__m512)v, top);
      }
      x[r] = top;
    }
  }
  const __m512 top = reduce_rows(x, [](__m512 p, __m512 q) { return _mm512_max_ps(p, q); });
  const __m512 m = _mm512_mask_loadu_ps(nothing, real, a.state.m + row), m_new = _mm512_max_ps(top, m);
  // Nothing seen yet (or NaN alone): subtracting 0 keeps the weights at 0.
  const __m512 base = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(m_new, nothing, _CMP_NEQ_UQ), m_new);
  const __m512 factor = (__m512)v_exp_below((V16)_mm512_sub_ps(m, base));
  _mm512_store_ps(w.base, base);
  _mm512_store_ps(w.factor, factor);
  _mm512_mask_storeu_ps(a.state.m + row, real, m_new);
  for (int64_t r = 0; r < rows; ++r) {
    const float* s = w.s + r * kBlock;
    uint16_t* p = w.p + r * kBlock;
    const V16 b = v_set(w.base[r]);
    V16 e[4];
    for (int c = 0; c < 4; ++c) {
      e[c] = v_zero();
      if (!kWhole && (16 * c < begin || 16 * c >= end)) continue;
      e[c] = v_exp_below(v_load(s + 16 * c) - b);
      if (c % 2) _mm512_store_si512(p + 16 * (c - 1), (__m512i)_mm512_cvtne2ps_pbh((__m512)e[c], (__m512)e[c - 1]));
    }
    x[r] = (__m512)((e[0] + e[1]) + (e[2] + e[3]));
  }
  for (int64_t r = rows; r < kRows; ++r) x[r] = _mm512_setzero_ps();
  const __m512 sum = reduce_rows(x, [](__m512 p, __m512 q) { return _mm512_add_ps(p, q); });
  const __m512 l = _mm512_maskz_loadu_ps(real, a.state.l + row);
  _mm512_mask_storeu_ps(a.state.l + row, real, _mm512_add_ps(_mm512_mul_ps(l, factor), sum));
}

// The block's values, by groups of 32 positions.
struct ValueGroup {
  const uint16_t* values;
  int64_t first;
};
template <int C>
inline void sums_tile(const uint16_t* p, const ValueGroup* groups, int64_t n, int64_t column, int64_t v_pad, float* o) {
  load_sums<C>(o, 4 * v_pad);
  Tiles::load<4>(p + groups[0].first, 2 * kBlock);
  add_products<C, 4>(groups[0].values + 2 * column, 4 * v_pad);
  if (n > 1) {
    Tiles::load<5>(p + groups[1].first, 2 * kBlock);
    add_products<C, 5>(groups[1].values + 2 * column, 4 * v_pad);
  }
  store_sums<C>(o, 4 * v_pad);
}

inline void sums_rows(const BlockArgs& a, int64_t row, int64_t rows, const Weights& w, const uint16_t* const* values) {
  float* o = a.state.o + row * a.v_pad;
  // o * 1 is o.
  uint32_t scaled = _mm512_cmp_ps_mask(_mm512_load_ps(w.factor), _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) & (0xffffu >> (kRows - rows));
  for (; scaled; scaled &= scaled - 1) {
    const int r = __builtin_ctz(scaled);
    const __m512 f = _mm512_set1_ps(w.factor[r]);
    for (int64_t c = 0; c < a.v_pad; c += 16) _mm512_storeu_ps(o + r * a.v_pad + c, _mm512_mul_ps(_mm512_loadu_ps(o + r * a.v_pad + c), f));
  }
  // A group that no row sees would add +0, which changes at most -0, and attn_finish turns that to 0.
  ValueGroup groups[2];
  int64_t n = 0;
  for (int64_t g = w.span.begin / kGroup; g * kGroup < w.span.end; ++g) groups[n++] = {values[g], g * kGroup};
  int64_t c = 0;
  for (; c + 64 <= a.v_pad; c += 64) sums_tile<4>(w.p, groups, n, c, a.v_pad, o + c);
  for (; c < a.v_pad; c += 16) sums_tile<1>(w.p, groups, n, c, a.v_pad, o + c);
}

}  // namespace

int64_t attn_scratch_bytes(int64_t v_pad) { return (kKeyTile + kGroup * v_pad) * 2; }

// Tiles 0 to 3 are sums, 4 and 5 left factors.
void attn_begin(int64_t height) { Tiles::configure(tile_config(6, height)); }
void attn_end() { Tiles::release(); }

void attn_block(const BlockArgs& a) {
  const int64_t groups = (a.dim + kGroup - 1) / kGroup, q_dim = groups * kGroup;
  uint16_t* const key_copy = a.scratch;
  uint16_t* const value_copy = key_copy + kKeyTile;
  // The last dimensions beside zeros: what lies behind them is another head's, or values.
  const uint16_t* last = a.keys_bf16 + (groups - 1) * kKeyTile;
  if (a.dim < q_dim) {
    const int64_t n = (a.dim - (groups - 1) * kGroup) * kBlock;
    memcpy(key_copy, last, size_t(n) * 2);
    memset(key_copy + n, 0, size_t(kKeyTile - n) * 2);
    last = key_copy;
  }
  // Values of positions that were not appended may be NaN, and 0 times NaN is NaN.
  const uint16_t* values[2] = {a.values_bf16, a.values_bf16 + kGroup * a.v_pad};
  if (a.filled % kGroup != 0) {
    const int64_t g = a.filled / kGroup, n = (a.filled % kGroup + 1) / 2 * 2 * a.v_pad;
    memcpy(value_copy, values[g], size_t(n) * 2);
    memset(value_copy + n, 0, size_t(kGroup * a.v_pad - n) * 2);
    values[g] = value_copy;
  }
  Weights w;
  for (int64_t row = 0; row < a.rows; row += a.height) {
    uint64_t any = 0, all = ~uint64_t(0);
    for (int64_t r = 0; r < a.height; ++r) any |= a.masks[row + r], all &= a.masks[row + r];
    if (any == 0) continue;
    w.span = {__builtin_ctzll(any), 64 - __builtin_clzll(any), 0};
    const uint16_t* q = a.q_bf16 + row * q_dim;
    const int64_t begin = w.span.begin / kGroup * kGroup;
    if (begin == 0 && w.span.end > kGroup)
      scores_tile<4>(q, 2 * q_dim, a.keys_bf16, groups, last, w.s);
    else
      scores_tile<2>(q, 2 * q_dim, a.keys_bf16 + 2 * begin, groups, last + 2 * begin, w.s + begin);
    if (all == ~uint64_t(0))
      softmax_rows<true>(a, row, a.height, w);
    else
      softmax_rows<false>(a, row, a.height, w);
    sums_rows(a, row, a.height, w, values);
  }
}

bool dot_is_two_chains() {
  // Exponents near those of the other operand, so that roundings differ from those of any other order, and near the
  // smallest.
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);
  uint64_t state = 1;
  const auto next = [&] { return uint32_t((state = state * 6364136223846793005u + 1442695040888963407u) >> 33); };
  bool same = true;
  attn_begin(kRows);
  for (int i = 0; i < 256; ++i) {
    const uint32_t centre = i % 2 == 0 ? 127 : 60;  // 2^-67 squared is denormal
    alignas(64) uint16_t x[kRows * kGroup], y[kRows * kGroup];
    alignas(64) uint32_t c[kRows * kRows];
    alignas(64) float got[kRows * kRows];
    for (int j = 0; j < kRows * kGroup; ++j) {
      x[j] = uint16_t(next() % 2 << 15 | (centre - 4 + next() % 8) << 7 | next() % 128);
      y[j] = uint16_t(next() % 2 << 15 | (centre - 4 + next() % 8) << 7 | next() % 128);
    }
    for (uint32_t& v : c) v = next() % 2 << 31 | (centre == 127 ? 119 + next() % 16 : next() % 8) << 23 | next() % 0x800000;
    Tiles::load<0>(c, 64);
    Tiles::load<4>(x, 64);
    Tiles::load<6>(y, 64);
    Tiles::dot<0, 4, 6>();
    Tiles::store<0>(got, 64);
    for (int r = 0; r < kRows; ++r) {
      __m512 even = _mm512_setzero_ps(), odd = even;
      for (int k = 0; k < kGroup; k += 2) {
        const __m512i pairs = _mm512_load_si512(y + k * kRows);
        const auto number = [&](int j) { return _mm512_castsi512_ps(_mm512_set1_epi32(int32_t(uint32_t(x[r * kGroup + j]) << 16))); };
        even = _mm512_fmadd_ps(number(k), _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), even);
        odd = _mm512_fmadd_ps(number(k + 1), _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int32_t(0xffff0000)))), odd);
      }
      const __m512 sum = _mm512_add_ps(_mm512_castsi512_ps(_mm512_load_si512(c + r * kRows)), _mm512_add_ps(even, odd));
      same &= _mm512_cmpeq_epi32_mask(_mm512_castps_si512(sum), _mm512_load_si512(got + r * kRows)) == 0xffff;
    }
  }
  attn_end();
  _mm_setcsr(before);
  return same;
}

}  // namespace mi::kernels::amx
