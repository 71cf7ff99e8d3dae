#pragma once
// The int4 products' loops, for a vector ISA given as a class V:
//   Reg                  a vector register; kRegs of them hold a 64-byte line (16 columns x 4 k)
//   dot(sum, w, x)       adds products of u8 w and s8 x to the sums
//   kFolds               sums of dot() are narrow: after at most eight, fold(acc, sum) adds them to int32 ones
//   kBlockRows, kBlockTiles   rows and tiles whose sums fit in the registers
//   load, store, broadcast, zero, low (the low halves of bytes), high (the high halves)
// Weights are u8 = q + 8, so a group's sum starts at -8 * sum x. As for int8 there are two paths. Up to kI4FewRows rows:
// reading the weights is all the cost; a line is unpacked in registers, three instructions that hide behind its load.
// More rows: a group of a few tiles is unpacked once, into the L1 cache, and all row blocks pass over it; their float
// sums wait in the scratch. Padded k count too: their weights are zeros.

#include "kernels/gemm/epilogue.h"
#include "kernels/gemm/pack.h"
#include "tensor/int4.h"

namespace mi::kernels::MI_ISA {

inline constexpr int kI4FewRows = 4;
inline constexpr int64_t kI4Prefetch = 1024;  // bytes ahead in the weight stream

#define MI_UNROLL _Pragma("GCC unroll 16")

static inline int32_t i4_sum32(const int8_t* p) {
  const __m256i shifted = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)p), _mm256_set1_epi8(char(0x80)));
  const __m256i quarters = _mm256_sad_epu8(shifted, _mm256_setzero_si256());
  const __m128i halves = _mm_add_epi64(_mm256_castsi256_si128(quarters), _mm256_extracti128_si256(quarters, 1));
  return _mm_cvtsi128_si32(_mm_add_epi64(halves, _mm_unpackhi_epi64(halves, halves))) - 32 * 128;
}

template <class V>
static inline typename V::Reg i4_x(const int8_t* p) {
  int32_t word;
  memcpy(&word, p, 4);
  return V::broadcast(word);
}

// t + acc * scale, as the contract wants it.
template <class V>
static inline V16 i4_add_group(const typename V::Reg* acc, V16 scale, V16 t) {
  I16 sum;
  memcpy(&sum, acc, 64);
  return v_fma(__builtin_convertvector(sum, V16), scale, t);
}

// R rows, one tile after the other. start: [R][groups], -8 * sum x.
template <class V, int R>
static void i4_few_rows(const GemmArgs& a, const GemmRange& r, const int8_t* const* rows, const int32_t* start) {
  constexpr int H = V::kRegs;
  const int64_t k_pad = pad_k(a.k), groups = int4_groups(a.k, a.group);
  const int8_t* x[R];
  MI_UNROLL
  for (int i = 0; i < R; ++i) x[i] = rows[i];
  for (int64_t tile = r.tile_begin; tile < r.tile_end; ++tile) {
    const uint8_t* w = (const uint8_t*)a.w + tile * 8 * k_pad;
    V16 t[R];
    MI_UNROLL
    for (int i = 0; i < R; ++i) t[i] = v_zero();
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = g * a.group, end = begin + a.group < k_pad ? begin + a.group : k_pad;
      typename V::Reg acc[R][H];
      MI_UNROLL
      for (int i = 0; i < R; ++i) MI_UNROLL
      for (int h = 0; h < H; ++h) acc[i][h] = V::broadcast(start[i * groups + g]);
      for (int64_t k = begin; k < end; k += 32, w += 256) {
        typename V::Reg narrow[R][H];
        auto& sum = *(V::kFolds ? &narrow : &acc);
        if constexpr (V::kFolds) {
          MI_UNROLL
          for (int i = 0; i < R; ++i) MI_UNROLL
          for (int h = 0; h < H; ++h) narrow[i][h] = V::zero();
        }
        MI_UNROLL
        for (int l = 0; l < 4; ++l) {
          __builtin_prefetch(w + l * 64 + kI4Prefetch, 0, 3);
          typename V::Reg low[H], high[H];
          MI_UNROLL
          for (int h = 0; h < H; ++h) {
            const typename V::Reg both = V::load(w + l * 64 + h * sizeof(typename V::Reg));
            low[h] = V::low(both);
            high[h] = V::high(both);
          }
          MI_UNROLL
          for (int i = 0; i < R; ++i) {
            const typename V::Reg x_low = i4_x<V>(x[i] + k + l * 8), x_high = i4_x<V>(x[i] + k + l * 8 + 4);
            MI_UNROLL
            for (int h = 0; h < H; ++h) sum[i][h] = V::dot(V::dot(sum[i][h], low[h], x_low), high[h], x_high);
          }
        }
        if constexpr (V::kFolds) {
          MI_UNROLL
          for (int i = 0; i < R; ++i) MI_UNROLL
          for (int h = 0; h < H; ++h) acc[i][h] = V::fold(acc[i][h], narrow[i][h]);
        }
      }
      const V16 scale = gemm_i4_scale(a, tile * groups + g);
      MI_UNROLL
      for (int i = 0; i < R; ++i) t[i] = i4_add_group<V>(acc[i], scale, t[i]);
    }
    MI_UNROLL
    for (int i = 0; i < R; ++i) gemm_finish(a, r.m_begin + i, tile, t[i] * v_set(gemm_x_scale(a, x[i])));
  }
}

// One group of R rows and N unpacked tiles (lines of 4 k: [N][32][64]) onto t [R][N].
template <class V, int R, int N>
static void i4_block(const uint8_t* lines, int64_t count, const int8_t* const* rows, int64_t k, const int32_t* start,
                     int64_t groups, const V16* scale, V16* t) {
  constexpr int H = V::kRegs, kStep = V::kFolds ? 8 : 1;
  typename V::Reg acc[R][N][H];
  const int8_t* x[R];
  MI_UNROLL
  for (int i = 0; i < R; ++i) {
    x[i] = rows[i] + k;
    MI_UNROLL
    for (int n = 0; n < N; ++n) MI_UNROLL
    for (int h = 0; h < H; ++h) acc[i][n][h] = V::broadcast(start[i * groups]);
  }
  for (int64_t l = 0; l < count; l += kStep) {
    typename V::Reg narrow[R][N][H];
    auto& sum = *(V::kFolds ? &narrow : &acc);
    if constexpr (V::kFolds) {
      MI_UNROLL
      for (int i = 0; i < R; ++i) MI_UNROLL
      for (int n = 0; n < N; ++n) MI_UNROLL
      for (int h = 0; h < H; ++h) narrow[i][n][h] = V::zero();
    }
    MI_UNROLL
    for (int u = 0; u < kStep; ++u) {
      typename V::Reg w[N][H];
      MI_UNROLL
      for (int n = 0; n < N; ++n) MI_UNROLL
      for (int h = 0; h < H; ++h) w[n][h] = V::load(lines + (n * 32 + l + u) * 64 + h * sizeof(typename V::Reg));
      MI_UNROLL
      for (int i = 0; i < R; ++i) {
        const typename V::Reg xr = i4_x<V>(x[i] + (l + u) * 4);
        MI_UNROLL
        for (int n = 0; n < N; ++n) MI_UNROLL
        for (int h = 0; h < H; ++h) sum[i][n][h] = V::dot(sum[i][n][h], w[n][h], xr);
      }
    }
    if constexpr (V::kFolds) {
      MI_UNROLL
      for (int i = 0; i < R; ++i) MI_UNROLL
      for (int n = 0; n < N; ++n) MI_UNROLL
      for (int h = 0; h < H; ++h) acc[i][n][h] = V::fold(acc[i][n][h], narrow[i][n][h]);
    }
  }
  MI_UNROLL
  for (int i = 0; i < R; ++i) MI_UNROLL
  for (int n = 0; n < N; ++n) t[i * N + n] = i4_add_group<V>(acc[i][n], scale[n], t[i * N + n]);
}

template <class V, int R, int N>
static void i4_rows(int count, const uint8_t* lines, int64_t line_count, const int8_t* const* rows, int64_t k,
                    const int32_t* start, int64_t groups, const V16* scale, V16* t) {
  if constexpr (R > 1) {
    if (count < R) return i4_rows<V, R - 1, N>(count, lines, line_count, rows, k, start, groups, scale, t);
  }
  i4_block<V, R, N>(lines, line_count, rows, k, start, groups, scale, t);
}

// m rows by tiles [tile, tile + N). t: [m][N]; lines: [N][32][64].
template <class V, int N>
static void i4_tiles(const GemmArgs& a, int64_t m_begin, int64_t m, int64_t tile, const int8_t* const* rows,
                     const int32_t* start, V16* t, uint8_t* lines) {
  const int64_t k_pad = pad_k(a.k), groups = int4_groups(a.k, a.group);
  // Equal row blocks: 8 rows are 4 + 4, not 6 + 2.
  const int64_t blocks = (m + V::kBlockRows - 1) / V::kBlockRows;
  for (int64_t i = 0; i < m * N; ++i) t[i] = v_zero();
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = g * a.group, end = begin + a.group < k_pad ? begin + a.group : k_pad;
    V16 scale[N];
    for (int n = 0; n < N; ++n) {
      const uint8_t* w = (const uint8_t*)a.w + ((tile + n) * k_pad + begin) * 8;
      uint8_t* out = lines + n * 32 * 64;
      for (int64_t k = begin; k < end; k += 8, w += 64, out += 128) {
        __builtin_prefetch(w + kI4Prefetch, 0, 3);
        MI_UNROLL
        for (int h = 0; h < V::kRegs; ++h) {
          const typename V::Reg both = V::load(w + h * sizeof(typename V::Reg));
          V::store(out + h * sizeof(typename V::Reg), V::low(both));
          V::store(out + 64 + h * sizeof(typename V::Reg), V::high(both));
        }
      }
      scale[n] = gemm_i4_scale(a, (tile + n) * groups + g);
    }
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t i = m * b / blocks;
      i4_rows<V, V::kBlockRows, N>(int(m * (b + 1) / blocks - i), lines, (end - begin) / 4, rows + i, begin,
                                   start + i * groups + g, groups, scale, t + i * N);
    }
  }
  for (int64_t i = 0; i < m; ++i)
    for (int n = 0; n < N; ++n)
      gemm_finish(a, m_begin + i, tile + n, t[i * N + n] * v_set(gemm_x_scale(a, rows[i])));
}

template <class V, int R>
static void i4_few(const GemmArgs& a, const GemmRange& r, const int8_t* const* rows, const int32_t* start) {
  if constexpr (R > 1) {
    if (r.m_end - r.m_begin < R) return i4_few<V, R - 1>(a, r, rows, start);
  }
  i4_few_rows<V, R>(a, r, rows, start);
}

template <class V>
static void i4_gemm(const GemmArgs& a, const GemmRange& r, void* scratch) {
  constexpr int N = V::kBlockTiles;
  const int64_t m = r.m_end - r.m_begin, k_pad = pad_k(a.k), groups = int4_groups(a.k, a.group);
  if (m <= 0) return;
  V16* t = (V16*)scratch;
  uint8_t* lines = (uint8_t*)(t + kMaxRangeRows * N);
  int32_t* start = (int32_t*)(lines + N * 32 * 64);
  static_assert(N <= 4, "gemm_scratch_bytes()");
  const int8_t* rows[kMaxRangeRows];
  for (int64_t i = 0; i < m; ++i) {
    rows[i] = gemm_x_i8(a, r.m_begin + i);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t end = (g + 1) * a.group < k_pad ? (g + 1) * a.group : k_pad;
      int32_t sum = 0;
      for (int64_t k = g * a.group; k < end; k += 32) sum += i4_sum32(rows[i] + k);
      start[i * groups + g] = -8 * sum;
    }
  }
  if (m <= kI4FewRows) return i4_few<V, kI4FewRows>(a, r, rows, start);
  int64_t tile = r.tile_begin;
  for (; tile + N <= r.tile_end; tile += N) i4_tiles<V, N>(a, r.m_begin, m, tile, rows, start, t, lines);
  if constexpr (N > 1)
    for (; tile < r.tile_end; ++tile) i4_tiles<V, 1>(a, r.m_begin, m, tile, rows, start, t, lines);
}

}  // namespace mi::kernels::MI_ISA
