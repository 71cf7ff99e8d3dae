#pragma once
// The float products' loops, for a vector ISA given as a class V: Reg, kRegs registers for the 16 columns of a tile,
// zero, broadcast, fma, and kSums, the registers that may hold sums. Weights through a class W: kGroup values of k lie
// together in a 64-byte line; load(line, j, h) gives the j-th of them for the h-th register's columns, widened to
// float. One chain of fma per output, k ascending, so the blocking below never changes a bit; a block of R rows and N
// tiles only serves to have enough independent chains at work.

#include "kernels/gemm/epilogue.h"
#include "kernels/gemm/pack.h"

namespace mi::kernels::MI_ISA {

#define MI_UNROLL _Pragma("GCC unroll 16")

template <class V, class W, int R, int N>
static void float_block(const GemmArgs& a, const float* const* x, int64_t row, int64_t tile) {
  constexpr int H = V::kRegs, G = W::kGroup;
  const int64_t tile_bytes = pad_k(a.k) / G * 64;
  const char* w = (const char*)a.w + tile * tile_bytes;
  typename V::Reg acc[R][N][H];
  MI_UNROLL
  for (int i = 0; i < R; ++i) MI_UNROLL
  for (int t = 0; t < N; ++t) MI_UNROLL
  for (int h = 0; h < H; ++h) acc[i][t][h] = V::zero();
  auto step = [&](int64_t line, int j) __attribute__((always_inline)) {
    typename V::Reg wr[N][H];
    MI_UNROLL
    for (int t = 0; t < N; ++t) MI_UNROLL
    for (int h = 0; h < H; ++h) wr[t][h] = W::load(w + t * tile_bytes + line * 64, j, h);
    MI_UNROLL
    for (int i = 0; i < R; ++i) {
      const typename V::Reg xr = V::broadcast(x[i][line * G + j]);
      MI_UNROLL
      for (int t = 0; t < N; ++t) MI_UNROLL
      for (int h = 0; h < H; ++h) acc[i][t][h] = V::fma(xr, wr[t][h], acc[i][t][h]);
    }
  };
  const int64_t lines = a.k / G;
  for (int64_t line = 0; line < lines; ++line) {
    MI_UNROLL
    for (int t = 0; t < N; ++t) __builtin_prefetch(w + t * tile_bytes + line * 64 + 1024, 0, 3);
    MI_UNROLL
    for (int j = 0; j < G; ++j) step(line, j);
  }
  for (int64_t k = lines * G; k < a.k; ++k) step(lines, int(k - lines * G));
  V16 sums[R][N];  // through memory: one copy of gemm_finish instead of R * N
  memcpy(sums, acc, sizeof sums);
#pragma GCC unroll 1
  for (int i = 0; i < R * N; ++i) gemm_finish(a, row + i / N, tile + i % N, sums[i / N][i % N]);
}

// `rows` <= R rows by all the range's tiles, N at a time.
template <class V, class W, int R, int N>
static void float_rows(const GemmArgs& a, const GemmRange& r, const float* const* x, int rows, int64_t row,
                       int64_t& tile) {
  for (; tile + N <= r.tile_end; tile += N) float_block<V, W, R, N>(a, x, row, tile);
  if constexpr (N > 1) float_rows<V, W, R, N / 2>(a, r, x, rows, row, tile);
}
// With few rows the weights come from memory, as one stream per tile. Tiles lie a power of two apart for most k, so eight
// streams fight for the same lines of the L1 cache: 4 read a bfloat16 head at 28 GB/s where 8 read it at 19 (Zen 4, one thread).
constexpr int float_tiles(int rows, int n) { return n >= 8 && rows > 2 ? 8 : n >= 4 ? 4 : n >= 2 ? 2 : 1; }
template <class V, class W, int R>
static void float_pick(const GemmArgs& a, const GemmRange& r, const float* const* x, int rows, int64_t row) {
  if constexpr (R > 1) {
    if (rows < R) return float_pick<V, W, R - 1>(a, r, x, rows, row);
  }
  int64_t tile = r.tile_begin;
  float_rows<V, W, R, float_tiles(R, V::kSums / (R * V::kRegs))>(a, r, x, rows, row, tile);
}

template <class V, class W>
static void float_gemm(const GemmArgs& a, const GemmRange& r) {
  const int64_t m = r.m_end - r.m_begin, blocks = (m + V::kBlockRows - 1) / V::kBlockRows;
  // Tiles in groups whose weights stay in the L2 cache while the row blocks pass.
  for (GemmRange part = r; part.tile_begin < r.tile_end; part.tile_begin = part.tile_end) {
    part.tile_end = part.tile_begin + 8 < r.tile_end ? part.tile_begin + 8 : r.tile_end;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t first = m * b / blocks, rows = m * (b + 1) / blocks - first;
      const float* x[V::kBlockRows];
      for (int64_t i = 0; i < rows; ++i) x[i] = gemm_x_f32(a, r.m_begin + first + i);
      float_pick<V, W, V::kBlockRows>(a, part, x, int(rows), r.m_begin + first);
    }
  }
}

}  // namespace mi::kernels::MI_ISA
