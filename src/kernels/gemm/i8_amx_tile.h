#pragma once
// The int8 products' loops for a matrix unit with tiles (Intel AMX), over a class T of tile operations:
//   configure(TileConfig), release()
//   zero<t>()            tile t = 0
//   load<t>(p, stride)   its rows from p, p + stride, ...; store<t>(p, stride) the other way
//   dot<c, a, b>()       tile c += tile a * tile b, signed bytes by signed bytes: no shift, no column sums
// i8_amx.cc has the instructions; tests run the same loops with T in plain C++ (amx_emulation.h), so that they are
// proved on any machine.
//
// A weight tile is 16 lines of the packed matrix as they lie there (16 columns, 64 k). The range's rows of x are cut
// into tiles of equal height, at most 16: 33 rows are 3 x 11, since a product takes as long as its tile is high. All
// tiles of a call have one height, so one configuration serves it. The last tile begins early enough to be full; the
// rows it shares with the tile before are computed twice and finished once (a residual may be the output).
//
//   up to 16 rows   1 tile of x by 4 of weights   sums 0..3, x 4, weights 5..7 in turn
//   more            2 by 2, every load used twice   sums 0..3, x 4 and 5, weights 6 and 7
//
// Sums leave through memory, the only way out of a tile. The rows of a block are finished while the next block
// multiplies, in units that would idle otherwise.
//
// Measured on a Xeon with 48 KiB of L1 and 2 MiB of L2 cache, one thread, a step of 2 by 2 tiles and 64 k: 20 ns if
// nothing is loaded, 25 with both operands in L1, 26 with rows in L2 and weights in L1, 36 with both in L2, 93 with
// weights in L3, 150 from memory (13 GB/s, what a thread reads at all). So rows and weights that come from further away
// than L1 share its 16 fill buffers: weights asked for ahead while other rows multiply gained nothing and took 10 to
// 40 %, and were taken out.

#include "kernels/amx.h"
#include "kernels/gemm/epilogue.h"
#include "kernels/gemm/pack.h"

namespace mi::kernels::MI_ISA {

inline constexpr int kTileRows = 16, kTileBytes = 1024, kTileInts = 256;
inline constexpr int kMaxRowTiles = int(kMaxRangeRows / kTileRows), kMaxRowBlocks = (kMaxRowTiles + 1) / 2;
static_assert(kMaxRangeRows % kTileRows == 0, "rounding rows up to whole tiles must not leave the scratch");

// Steps of 64 k after which the next row block comes, when there are several: the weights of a 2 by 2 block, 2 KiB a
// step, then stay in the L1 cache while all row blocks pass. 128 rows of 2048: 43 ns a step by 8 steps, 52 by 16 (both
// operands in L2; from memory 72 and 74); by 4 the loads and stores of sums cost more than is gained.
inline constexpr int64_t kDepthSteps = 8;
// The first block of rows waits for weights from memory: they are asked for this many bytes ahead, two steps of 64 k,
// into the L2 cache: two threads then read 32 GB/s, 29 if into L1, 24 if not asked for.
inline constexpr int64_t kTilePrefetch = 2 * kTileBytes;

struct TileRows {
  const GemmArgs& a;
  int64_t m_begin, m;             // the range
  int64_t height, tiles;          // rows of a tile, tiles of rows
  int64_t stride, step;           // bytes from row to row in a tile, and from 64 k to the next
  int64_t first[kMaxRowTiles];    // of tile i: its first row, counted in the range,
  const int8_t* x[kMaxRowTiles];  //           and where that row begins
  float scale[kMaxRangeRows];
};

// A block whose sums are stored: rows [row, end) of the range by n column tiles are still to be finished.
struct TileSums {
  const int32_t* line = nullptr;       // row's sums of the first column tile; the others kTileInts apart
  const int32_t* next_line = nullptr;  // the same of the row that begins the block's second tile of rows
  int64_t row = 0, next_tile = 0, end = 0;  // next_tile: that row, or end
  int64_t tile = 0;
  int n = 0;
};

// Rows [row, end) of a block in one column tile; line: row's sums.
template <bool kStream>
static inline void scale_rows(const TileRows& x, const int32_t* line, int64_t row, int64_t end, int64_t tile) {
  const GemmArgs& a = x.a;
  const V16 w_scale = v_load(a.w_scale + tile * 16);
  for (; row < end; ++row, line += 16) {
    I16 sums;
    memcpy(&sums, line, 64);
    const V16 y = __builtin_convertvector(sums, V16) * v_set(x.scale[row]) * w_scale;
    float* to = gemm_row(a.y, a.y_stride, gemm_y_row(a, x.m_begin + row)) + tile * 16;
    if (kStream)
      v_stream(to, y);
    else
      v_store(to, y);
  }
}
static void finish_tile(const TileRows& x, const int32_t* line, int64_t row, int64_t end, int64_t tile) {
  const GemmArgs& a = x.a;
  if (a.bias || a.residual || a.out_scale != 1.0f || a.n - tile * 16 < 16) {
    for (; row < end; ++row, line += 16) {
      I16 sums;
      memcpy(&sums, line, 64);
      gemm_finish_i8(a, x.m_begin + row, tile, sums, false, x.scale[row]);
    }
  } else if (a.stream_y) {
    scale_rows<true>(x, line, row, end, tile);
  } else {
    scale_rows<false>(x, line, row, end, tile);
  }
}
// Out of line: one copy, called from each kind of block.
__attribute__((noinline)) static void finish_rows(const TileRows& x, TileSums& s) {
  for (int c = 0; c < s.n; ++c) {
    finish_tile(x, s.line + c * kTileInts, s.row, s.next_tile, s.tile + c);
    finish_tile(x, s.next_line + c * kTileInts, s.next_tile, s.end, s.tile + c);
  }
  s.n = 0;
}

template <int N>
constexpr int weight_tile(int c) {
  return N > 2 ? 5 + c % 3 : 6 + c;
}

// What one step does for column tile C and those after it: weights in, products with R tiles of rows.
template <class T, int R, int N, int C = 0>
__attribute__((always_inline)) static inline void tile_columns(const int8_t* w, int64_t tile_bytes) {
  if constexpr (C < N) {
    constexpr int W = weight_tile<N>(C);
    T::template load<W>(w + C * tile_bytes, 64);
    T::template dot<C, 4, W>();
    if constexpr (R == 2) T::template dot<N + C, 5, W>();
    tile_columns<T, R, N, C + 1>(w, tile_bytes);
  }
}
template <class T, int Count, int C = 0>
__attribute__((always_inline)) static inline void sums_begin(const int32_t* sums, bool add) {
  if constexpr (C < Count) {
    if (add)
      T::template load<C>(sums + C * kTileInts, 64);
    else
      T::template zero<C>();
    sums_begin<T, Count, C + 1>(sums, add);
  }
}
template <class T, int Count, int C = 0>
__attribute__((always_inline)) static inline void sums_store(int32_t* sums) {
  if constexpr (C < Count) {
    T::template store<C>(sums + C * kTileInts, 64);
    sums_store<T, Count, C + 1>(sums);
  }
}

// The steps of one block: R tiles of rows from tile x0, x1, N of weights from w.
struct TileSteps {
  const int8_t *x0, *x1, *w;
  int64_t tile_bytes, count;
  bool add;                 // to sums that an earlier call stored
  bool first_use;  // of the weights
};

template <class T, int R, int N>
static void tile_block(const TileRows& x, const TileSteps& s, int32_t* sums, TileSums& before) {
  const int64_t stride = x.stride, step = x.step, tile_bytes = s.tile_bytes, count = s.count;
  const bool first_use = s.first_use;
  const int8_t *x0 = s.x0, *x1 = s.x1, *w = s.w;
  sums_begin<T, R * N>(sums, s.add);
  for (int64_t i = 0; i < count; ++i) {
    T::template load<4>(x0, stride);
    if constexpr (R == 2) T::template load<5>(x1, stride);
    tile_columns<T, R, N>(w, tile_bytes);
    if (first_use) {
      for (int c = 0; c < N; ++c)
        for (int l = 0; l < 16; ++l) __builtin_prefetch(w + c * tile_bytes + kTilePrefetch + l * 64, 0, 2);
    }
    if (i == 0) finish_rows(x, before);
    x0 += step;
    x1 += step;
    w += kTileBytes;
  }
  sums_store<T, R * N>(sums);
}

template <class T, int R>
static void tile_columns_pick(const TileRows& x, const TileSteps& s, int n, int32_t* sums, TileSums& before) {
  if (n == 1) return tile_block<T, R, 1>(x, s, sums, before);
  if constexpr (R == 1) {
    if (n == 3) return tile_block<T, R, 3>(x, s, sums, before);
    if (n == 4) return tile_block<T, R, 4>(x, s, sums, before);
  }
  tile_block<T, R, 2>(x, s, sums, before);
}

// Fills in all but a, m_begin, m. Rows that are equally far apart are loaded where they are; others are brought
// together, tile by tile as they will be loaded: 1 KiB for each 64 k of a full tile.
static void tile_rows(TileRows& x, int64_t steps, int8_t* scratch) {
  const GemmArgs& a = x.a;
  x.tiles = (x.m + kTileRows - 1) / kTileRows;
  x.height = (x.m + x.tiles - 1) / x.tiles;
  const int8_t* row[kMaxRangeRows];
  for (int64_t i = 0; i < x.m; ++i) {
    row[i] = gemm_x_i8(a, x.m_begin + i);
    x.scale[i] = gemm_x_scale(a, row[i]);
  }
  x.stride = x.m > 1 ? row[1] - row[0] : 0;
  bool even = true;
  for (int64_t i = 2; i < x.m; ++i) even &= row[i] - row[i - 1] == x.stride;
  x.step = 64;
  if (!even) {
    x.stride = 64;
    x.step = x.height * 64;
  }
  for (int64_t t = 0; t < x.tiles; ++t) {
    x.first[t] = t * x.height < x.m - x.height ? t * x.height : x.m - x.height;
    x.x[t] = row[x.first[t]];
    if (even) continue;
    int8_t* tile = scratch + t * x.height * 64 * steps;
    x.x[t] = tile;
    if (a.same_x) continue;
    for (int64_t i = 0; i < x.height; ++i)
      for (int64_t k = 0; k < steps; ++k) memcpy(tile + k * x.step + i * 64, row[x.first[t] + i] + k * 64, 64);
  }
}

template <class T>
static void tile_gemm(const GemmArgs& a, const GemmRange& r, void* scratch) {
  if (r.m_end <= r.m_begin) return;
  const int64_t steps = pad_k(a.k) / 64, tile_bytes = steps * kTileBytes;
  TileRows x = {a, r.m_begin, r.m_end - r.m_begin};
  tile_rows(x, steps, (int8_t*)scratch);

  const bool one = x.tiles == 1;  // tile of rows
  // Per call and not once per thread: it costs some hundred cycles of a call's ten thousands, and while tiles are
  // configured the kernel saves 8 KiB more at each switch of threads and keeps an idle core out of its deepest sleep.
  T::configure(tile_config(one ? 5 : 6, x.height));

  const int64_t row_blocks = (x.tiles + 1) / 2;
  const int64_t cuts = row_blocks > 1 ? (steps + kDepthSteps - 1) / kDepthSteps : 1;
  const int width = one ? 4 : 2;
  // A block's own place where its sums wait for the next cut; otherwise one for all: a block is finished before the
  // next one stores.
  alignas(64) int32_t sums[kMaxRowBlocks][4 * kTileInts];
  TileSums before;
  for (int64_t tile = r.tile_begin; tile < r.tile_end; tile += width) {
    const int n = r.tile_end - tile < width ? int(r.tile_end - tile) : width;
    for (int64_t cut = 0; cut < cuts; ++cut) {
      const int64_t k0 = steps * cut / cuts, k1 = steps * (cut + 1) / cuts;
      for (int64_t b = 0; b < row_blocks; ++b) {
        const int64_t t = b * 2;
        const bool two = t + 1 < x.tiles;
        int32_t* out = sums[cuts > 1 ? b : 0];
        TileSteps s;
        s.x0 = x.x[t] + k0 * x.step;
        s.x1 = x.x[two ? t + 1 : t] + k0 * x.step;
        s.w = (const int8_t*)a.w + tile * tile_bytes + k0 * kTileBytes;
        s.tile_bytes = tile_bytes;
        s.count = k1 - k0;
        s.add = cut > 0;
        s.first_use = b == 0;
        if (two)
          tile_columns_pick<T, 2>(x, s, n, out, before);
        else
          tile_columns_pick<T, 1>(x, s, n, out, before);
        if (cut + 1 < cuts) continue;
        before.row = t * x.height;
        before.end = before.row + (two ? 2 : 1) * x.height < x.m ? before.row + (two ? 2 : 1) * x.height : x.m;
        before.line = out + (before.row - x.first[t]) * 16;
        before.next_tile = two ? before.row + x.height : before.end;
        before.next_line = out + n * kTileInts + (two ? (before.next_tile - x.first[t + 1]) * 16 : 0);
        before.tile = tile;
        before.n = n;
      }
    }
  }
  T::release();
  finish_rows(x, before);
  if (a.stream_y) v_stream_end();
}

}  // namespace mi::kernels::MI_ISA
