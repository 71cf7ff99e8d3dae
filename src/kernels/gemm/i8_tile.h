#pragma once
// The int8 products' loops, for a vector ISA given as a class V:
//   Reg                  a vector register; kRegs of them hold a 64-byte line (16 columns x 4 k)
//   kShifted             activations enter dot() as u8 = q + 128 (VNNI multiplies u8 by s8)
//   kBlockRows, kBlockTiles   rows and tiles whose sums fit in the registers
//   kSums                registers the row path may use for sums
//   load, broadcast, zero, add, dot, shift (xor of 0x80), store_line
// Two paths. Up to kFewRows rows: reading the weights is all the cost, so each tile is read once, front to back, one
// stream. More rows: blocks of kBlockRows x kBlockTiles sums in registers, over the tiles' whole k (blocks of 12 rows
// x 1 tile, one stream, ran at 0.5 to 0.9 of their speed from 8 rows on, Zen 4). Shifted rows are
// made once per call, in the caller's scratch: a shift beside every dot() would cost the port that dot() needs. Integer
// sums are exact, so the order of additions is free.

#include "kernels/gemm/epilogue.h"
#include "kernels/gemm/pack.h"

namespace mi::kernels::MI_ISA {

inline constexpr int kFewRows = 4;
inline constexpr int64_t kPrefetch = 3072;  // bytes ahead in the weight stream; 1024 took 3 % longer with few rows, Zen 4
// Lines to bring into a cache beside each line that is computed. A range's first block of rows reads its tiles front to back
// and brings them into the L1 cache a little earlier. The others find theirs in the L2 cache, and together bring the next
// tiles there, each its part, so that memory is asked evenly.
struct Fetch {
  const int8_t* next;  // its part of the next tiles; null: its own
  int64_t lines;       // of these beside each line: a template argument of the loops
};

// Where the weights after this range are.
static inline const int8_t* i8_after(const GemmArgs& a, const GemmRange& r) {
  return a.w_next ? (const int8_t*)a.w_next : (const int8_t*)a.w + r.tile_end * 16 * pad_k(a.k);
}

#define MI_UNROLL _Pragma("GCC unroll 16")

template <class V>
static inline typename V::Reg i8_x(const int8_t* p) {
  int32_t word;
  memcpy(&word, p, 4);
  return V::broadcast(word);
}

template <class V>
static inline I16 i8_line(const typename V::Reg* regs) {
  I16 v;
  memcpy(&v, regs, 64);
  return v;
}

// R rows, one tile after the other; U lines of a tile at once, each with sums of its own, to hide the latency of dot().
template <class V, int R>
static void i8_few_rows(const GemmArgs& a, const GemmRange& r, const int8_t* const* rows, const float* x_scale) {
  constexpr int U0 = V::kSums / (R * V::kRegs), U = U0 >= 4 ? 4 : U0 >= 2 ? 2 : 1;
  const int64_t k_pad = pad_k(a.k), lines = (a.k + 3) / 4;
  // From the end of these weights to what follows.
  const int64_t gap = i8_after(a, r) - ((const int8_t*)a.w + r.tile_end * 16 * k_pad);
  const int8_t* x[R];
  for (int i = 0; i < R; ++i) x[i] = rows[i];
  for (int64_t tile = r.tile_begin; tile < r.tile_end; ++tile) {
    const int8_t* w = (const int8_t*)a.w + tile * 16 * k_pad;
    typename V::Reg acc[R][U][V::kRegs];
    MI_UNROLL
    for (int i = 0; i < R; ++i) MI_UNROLL
    for (int u = 0; u < U; ++u) MI_UNROLL
    for (int h = 0; h < V::kRegs; ++h) acc[i][u][h] = V::zero();
    int64_t l = 0, ahead = kPrefetch;
    const int64_t own = tile + 1 < r.tile_end ? lines : lines - kPrefetch / 64;
    const int64_t stops[] = {own, lines};
    for (const int64_t stop : stops) {
      for (; l + U <= stop; l += U) {
        MI_UNROLL
        for (int u = 0; u < U; ++u) {
          const int8_t* line = w + (l + u) * 64;
          __builtin_prefetch(line + ahead, 0, 3);
          typename V::Reg wr[V::kRegs];
          MI_UNROLL
          for (int h = 0; h < V::kRegs; ++h) wr[h] = V::load(line + h * sizeof(typename V::Reg));
          MI_UNROLL
          for (int i = 0; i < R; ++i) {
            const typename V::Reg xr = i8_x<V>(x[i] + (l + u) * 4);
            MI_UNROLL
            for (int h = 0; h < V::kRegs; ++h) acc[i][u][h] = V::dot(acc[i][u][h], wr[h], xr);
          }
        }
      }
      ahead += gap;
    }
    for (; l < lines; ++l) {
      MI_UNROLL
      for (int i = 0; i < R; ++i) {
        const typename V::Reg xr = i8_x<V>(x[i] + l * 4);
        MI_UNROLL
        for (int h = 0; h < V::kRegs; ++h)
          acc[i][0][h] = V::dot(acc[i][0][h], V::load(w + l * 64 + h * sizeof(typename V::Reg)), xr);
      }
    }
    MI_UNROLL
    for (int i = 0; i < R; ++i) {
      MI_UNROLL
      for (int u = 1; u < U; ++u) MI_UNROLL
      for (int h = 0; h < V::kRegs; ++h) acc[i][0][h] = V::add(acc[i][0][h], acc[i][u][h]);
      gemm_finish_i8(a, r.m_begin + i, tile, i8_line<V>(acc[i][0]), V::kShifted, x_scale[i]);
    }
  }
}

// Rows [i, i + R) of the brought-together rows, tiles [tile, tile + N).
template <class V, int R, int N, int kNext>
static inline void i8_block(const GemmArgs& a, const int8_t* const* x, const float* x_scale, int64_t row,
                            int64_t tile, const int8_t* next) {
  const int64_t tile_bytes = 16 * pad_k(a.k), lines = (a.k + 3) / 4;
  const int8_t* w = (const int8_t*)a.w + tile * tile_bytes;
  typename V::Reg acc[R][N][V::kRegs];
  MI_UNROLL
  for (int i = 0; i < R; ++i) MI_UNROLL
  for (int t = 0; t < N; ++t) MI_UNROLL
  for (int h = 0; h < V::kRegs; ++h) acc[i][t][h] = V::zero();
  const int8_t* xp[R];
  MI_UNROLL
  for (int i = 0; i < R; ++i) xp[i] = x[i];
  for (int64_t l = 0; l < lines; ++l) {
    typename V::Reg wr[N][V::kRegs];
    MI_UNROLL
    for (int t = 0; t < N; ++t) {
      if (kNext == 0) __builtin_prefetch(w + t * tile_bytes + l * 64 + kPrefetch, 0, 3);
      if (t < kNext) __builtin_prefetch(next + (l * kNext + t) * 64, 0, 2);
      MI_UNROLL
      for (int h = 0; h < V::kRegs; ++h) wr[t][h] = V::load(w + t * tile_bytes + l * 64 + h * sizeof(typename V::Reg));
    }
    MI_UNROLL
    for (int i = 0; i < R; ++i) {
      const typename V::Reg xr = i8_x<V>(xp[i] + l * 4);
      MI_UNROLL
      for (int t = 0; t < N; ++t) MI_UNROLL
      for (int h = 0; h < V::kRegs; ++h) acc[i][t][h] = V::dot(acc[i][t][h], wr[t][h], xr);
    }
  }
  I16 sums[R][N];  // through memory: one copy of gemm_finish_i8 instead of R * N
  memcpy(sums, acc, sizeof sums);
#pragma GCC unroll 1
  for (int i = 0; i < R * N; ++i)
    gemm_finish_i8(a, row + i / N, tile + i % N, sums[i / N][i % N], V::kShifted, x_scale[i / N]);
}

template <class V, int R, int N>
static void i8_rows(const GemmArgs& a, const GemmRange& r, const int8_t* const* x, const float* x_scale, int rows,
                    int64_t row, int64_t tile, const Fetch& fetch) {
  if constexpr (R > 1) {
    if (rows < R) return i8_rows<V, R - 1, N>(a, r, x, x_scale, rows, row, tile, fetch);
  }
  if (!fetch.next) return i8_block<V, R, N, 0>(a, x, x_scale, row, tile, nullptr);
  if (fetch.lines == 1) return i8_block<V, R, N, 1>(a, x, x_scale, row, tile, fetch.next);
  if (fetch.lines < N) return i8_block<V, R, N, (N + 1) / 2>(a, x, x_scale, row, tile, fetch.next);
  i8_block<V, R, N, N>(a, x, x_scale, row, tile, fetch.next);
}

// N tiles at a time, as many as the range has left. Equal row blocks: 8 rows are 4 + 4, not 6 + 2.
template <class V, int N>
static void i8_tiles(const GemmArgs& a, const GemmRange& r, const int8_t* const* x, const float* x_scale, int64_t& tile) {
  const int64_t m = r.m_end - r.m_begin, blocks = (m + V::kBlockRows - 1) / V::kBlockRows;
  const int64_t tile_bytes = 16 * pad_k(a.k), line_bytes = (a.k + 3) / 4 * 64;
  for (bool first = true; tile + N <= r.tile_end; tile += N, first = false) {
    const int8_t* w = (const int8_t*)a.w + tile * tile_bytes;
    const int8_t* next = tile + N < r.tile_end ? w + N * tile_bytes : i8_after(a, r);
    // Beside each line as few lines of the next tiles as suffice.
    const int64_t fetching = blocks - (first ? 1 : 0), per_line = fetching >= N ? 1 : fetching >= (N + 1) / 2 ? (N + 1) / 2 : N;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t i = m * b / blocks, part = (first ? b - 1 : b) * per_line * line_bytes;
      const Fetch fetch = part < 0 ? Fetch{nullptr, 0} : Fetch{next + part % (N * tile_bytes), per_line};
      i8_rows<V, V::kBlockRows, N>(a, r, x + i, x_scale + i, int(m * (b + 1) / blocks - i), r.m_begin + i, tile, fetch);
    }
  }
}

template <class V, int R>
static void i8_few(const GemmArgs& a, const GemmRange& r, const int8_t* const* x, const float* x_scale) {
  if constexpr (R > 1) {
    if (r.m_end - r.m_begin < R) return i8_few<V, R - 1>(a, r, x, x_scale);
  }
  i8_few_rows<V, R>(a, r, x, x_scale);
}

template <class V>
static void i8_gemm(const GemmArgs& a, const GemmRange& r, void* scratch) {
  const int64_t m = r.m_end - r.m_begin, k_pad = pad_k(a.k);
  if (m <= 0) return;
  const int8_t* x[kMaxRangeRows];
  float x_scale[kMaxRangeRows];
  for (int64_t i = 0; i < m; ++i) {
    x[i] = gemm_x_i8(a, r.m_begin + i);
    x_scale[i] = gemm_x_scale(a, x[i]);
    if constexpr (V::kShifted) {
      int8_t* row = (int8_t*)scratch + i * k_pad;
      if (!a.same_x)
        for (int64_t k = 0; k < k_pad; k += sizeof(typename V::Reg)) V::store(row + k, V::shift(V::load(x[i] + k)));
      x[i] = row;
    }
  }
  if (m <= kFewRows) return i8_few<V, kFewRows>(a, r, x, x_scale);
  int64_t tile = r.tile_begin;
  i8_tiles<V, V::kBlockTiles>(a, r, x, x_scale, tile);
  if constexpr (V::kBlockTiles > 1) i8_tiles<V, 1>(a, r, x, x_scale, tile);
}

}  // namespace mi::kernels::MI_ISA
