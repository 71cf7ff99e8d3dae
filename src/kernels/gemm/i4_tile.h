#pragma once
// The int4 products' loop, for a vector ISA given as a class V:
//   Reg                  a vector register; kRegs of them hold a 64-byte line (16 columns x 4 k)
//   dot(sum, w, x)       adds products of u8 w and s8 x to the sums
//   kFolds               sums of dot() are narrow: after at most eight, fold(acc, sum) adds them to int32 ones
//   kBlockRows           rows whose sums fit in the registers
//   load, broadcast, zero, add, low (the low halves of bytes), high (the high halves)
// A tile is read once for up to kBlockRows rows, front to back, and unpacked in registers: three instructions a line, which
// hide behind its load where reading is the cost, and are a sixth of the work at eight rows. More rows pass over the tile
// in blocks, while it is in the cache. Few rows have several sums each, or one would wait for the dot() before. (A second path that unpacked a group of four tiles into the L1 cache for blocks of
// six rows was not faster, float sums having to wait in memory.) Weights are u8 = q + 8, so a group's sum starts at
// -8 * sum x. Padded k count too: their weights are zeros.

#include "kernels/gemm/epilogue.h"
#include "kernels/gemm/pack.h"
#include "tensor/int4.h"

namespace mi::kernels::MI_ISA {

inline constexpr int64_t kI4Prefetch = 3072;  // bytes ahead in the weight stream

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

// Where the range's weights end, and how far behind it the thread's next ones are.
struct I4Stream {
  const uint8_t* end;
  int64_t gap;
};

// Rows [row, row + R) by one tile. x, start: theirs; start: [R][groups], -8 * sum x. Not inlined: one function for all row
// counts is more than GCC allocates registers well for.
template <class V, int R>
__attribute__((noinline)) static void i4_block(const GemmArgs& a, int64_t row, int64_t tile, const int8_t* const* rows,
                                               const int32_t* start, const I4Stream& stream) {
  constexpr int H = V::kRegs;
  constexpr int U = V::kFolds || R * H > 4 ? 1 : R * H > 2 ? 2 : R * H == 2 ? 4 : 8;  // sums of a row: dot() has a latency
  const int64_t k_pad = pad_k(a.k), groups = int4_groups(a.k, a.group);
  const uint8_t* w = (const uint8_t*)a.w + tile * 8 * k_pad;
  const int8_t* x[R];
  V16 t[R];
  MI_UNROLL
  for (int i = 0; i < R; ++i) {
    x[i] = rows[i];
    t[i] = v_zero();
  }
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = g * a.group, end = begin + a.group < k_pad ? begin + a.group : k_pad;
    typename V::Reg acc[R][U][H];
    MI_UNROLL
    for (int i = 0; i < R; ++i) MI_UNROLL
    for (int u = 0; u < U; ++u) MI_UNROLL
    for (int h = 0; h < H; ++h) acc[i][u][h] = u == 0 ? V::broadcast(start[i * groups + g]) : V::zero();
    for (int64_t k = begin; k < end; k += 32, w += 256) {
      const uint8_t* later = w + kI4Prefetch;
      if (later >= stream.end) later += stream.gap;
      typename V::Reg narrow[R][U][H];
      auto& sum = *(V::kFolds ? &narrow : &acc);
      if constexpr (V::kFolds) {
        MI_UNROLL
        for (int i = 0; i < R; ++i) MI_UNROLL
        for (int h = 0; h < H; ++h) narrow[i][0][h] = V::zero();
      }
      MI_UNROLL
      for (int l = 0; l < 4; ++l) {
        __builtin_prefetch(later + l * 64, 0, 3);
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
          for (int h = 0; h < H; ++h) {
            sum[i][2 * l % U][h] = V::dot(sum[i][2 * l % U][h], low[h], x_low);
            sum[i][(2 * l + 1) % U][h] = V::dot(sum[i][(2 * l + 1) % U][h], high[h], x_high);
          }
        }
      }
      if constexpr (V::kFolds) {
        MI_UNROLL
        for (int i = 0; i < R; ++i) MI_UNROLL
        for (int h = 0; h < H; ++h) acc[i][0][h] = V::fold(acc[i][0][h], narrow[i][0][h]);
      }
    }
    const V16 scale = gemm_i4_scale(a, tile * groups + g);
    MI_UNROLL
    for (int i = 0; i < R; ++i) {
      MI_UNROLL
      for (int u = 1; u < U; ++u) MI_UNROLL
      for (int h = 0; h < H; ++h) acc[i][0][h] = V::add(acc[i][0][h], acc[i][u][h]);
      t[i] = i4_add_group<V>(acc[i][0], scale, t[i]);
    }
  }
  MI_UNROLL
  for (int i = 0; i < R; ++i) gemm_finish(a, row + i, tile, t[i] * v_set(gemm_x_scale(a, x[i])));
}

template <class V, int R>
static void i4_rows(const GemmArgs& a, int64_t row, int64_t count, int64_t tile, const int8_t* const* rows,
                    const int32_t* start, const I4Stream& stream) {
  if constexpr (R > 1) {
    if (count < R) return i4_rows<V, R - 1>(a, row, count, tile, rows, start, stream);
  }
  i4_block<V, R>(a, row, tile, rows, start, stream);
}

template <class V>
static void i4_gemm(const GemmArgs& a, const GemmRange& r, void* scratch) {
  const int64_t m = r.m_end - r.m_begin, k_pad = pad_k(a.k), groups = int4_groups(a.k, a.group);
  if (m <= 0) return;
  int32_t* start = (int32_t*)scratch;
  const int8_t* rows[kMaxRangeRows];
  for (int64_t i = 0; i < m; ++i) {
    rows[i] = gemm_x_i8(a, r.m_begin + i);
    if (a.same_x) continue;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t end = (g + 1) * a.group < k_pad ? (g + 1) * a.group : k_pad;
      int32_t sum = 0;
      for (int64_t k = g * a.group; k < end; k += 32) sum += i4_sum32(rows[i] + k);
      start[i * groups + g] = -8 * sum;
    }
  }
  // Equal row blocks: 9 rows are 5 + 4, not 8 + 1.
  const int64_t blocks = (m + V::kBlockRows - 1) / V::kBlockRows;
  const uint8_t* end = (const uint8_t*)a.w + r.tile_end * 8 * k_pad;
  const I4Stream stream = {end, a.w_next ? (const uint8_t*)a.w_next - end : 0};
  for (int64_t tile = r.tile_begin; tile < r.tile_end; ++tile)
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t i = m * b / blocks;
      i4_rows<V, V::kBlockRows>(a, r.m_begin + i, m * (b + 1) / blocks - i, tile, rows + i, start + i * groups,
                                stream);
    }
}

}  // namespace mi::kernels::MI_ISA
