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
// multiplies, in units that would idle otherwise: a few at each step. All of them behind its first step fill the reorder
// buffer while they wait for the sums to be stored, and the tiles wait with them.
//
// Measured on a Xeon with 48 KiB of L1 and 2 MiB of L2 cache, one thread, a step of 2 by 2 tiles and 64 k, the loop
// alone: 17 ns if nothing is loaded, 20 with both operands in L1, 22 with rows in L2 and weights in L1, 27 with both in
// L2. With what is around it, 128 rows of 2048 by 256 columns: 31 ns, 33 to 36 if the sums are stored and loaded again
// after every 8 steps so that weights stay in L1, 65 if a block's rows are finished at once; by 768 columns that come from
// memory 60, of which 38 is what a thread takes to read them (13.5 GB/s). Rows and weights that come from further away
// than L1 share its 16 fill buffers: weights asked for ahead while other rows multiply gained nothing.

#include "kernels/amx.h"
#include "kernels/gemm/epilogue.h"
#include "kernels/gemm/pack.h"

namespace mi::kernels::MI_ISA {

inline constexpr int kTileRows = 16, kTileBytes = 1024, kTileInts = 256;
inline constexpr int kMaxRowTiles = int(kMaxRangeRows / kTileRows);
static_assert(kMaxRangeRows % kTileRows == 0, "rounding rows up to whole tiles must not leave the scratch");

// The first block of rows waits for weights from memory: they are asked for this many bytes ahead, two steps of 64 k,
// into the L2 cache: two threads then read 32 GB/s, 29 if into L1, 24 if not asked for.
inline constexpr int64_t kTilePrefetch = 2 * kTileBytes;
// Lines of 16 sums that are finished at each step, at least: 2 to 6 take the same time, 16 a third more.
inline constexpr int64_t kStepLines = 4;

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

template <int kWay>  // 0: with all that a product may end with; 1: scaled and stored; 2: past the caches
static inline void finish_row(const TileRows& x, const TileSums& s) {
  const GemmArgs& a = x.a;
  float* to = gemm_row(a.y, a.y_stride, gemm_y_row(a, x.m_begin + s.row)) + s.tile * 16;
  for (int c = 0; c < s.n; ++c) {
    I16 sums;
    memcpy(&sums, s.line + c * kTileInts, 64);
    if (kWay == 0) {
      gemm_finish_i8(a, x.m_begin + s.row, s.tile + c, sums, false, x.scale[s.row]);
      continue;
    }
    const V16 y = __builtin_convertvector(sums, V16) * v_set(x.scale[s.row]) * v_load(a.w_scale + (s.tile + c) * 16);
    if (kWay == 2)
      v_stream(to + c * 16, y);
    else
      v_store(to + c * 16, y);
  }
}
template <int kWay>
static inline void finish_rows_by(const TileRows& x, TileSums& sums, int64_t stop) {
  TileSums s = sums;  // in registers
  for (; s.row < stop; ++s.row, s.line += 16) {
    if (s.row == s.next_tile) s.line = s.next_line;
    finish_row<kWay>(x, s);
  }
  sums.row = s.row;
  sums.line = s.line;
}
// The next `rows` of the block, or what is left. Out of line: one copy, called from each kind of block.
__attribute__((noinline)) static void finish_rows(const TileRows& x, TileSums& s, int64_t rows) {
  const GemmArgs& a = x.a;
  const int64_t stop = s.end - s.row < rows ? s.end : s.row + rows;
  if (a.bias || a.residual || a.out_scale != 1.0f || a.n - s.tile * 16 < s.n * 16)
    finish_rows_by<0>(x, s, stop);
  else if (a.stream_y)
    finish_rows_by<2>(x, s, stop);
  else
    finish_rows_by<1>(x, s, stop);
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
__attribute__((always_inline)) static inline void sums_begin() {
  if constexpr (C < Count) {
    T::template zero<C>();
    sums_begin<T, Count, C + 1>();
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
  bool first_use;  // of the weights
};

template <class T, int R, int N>
static void tile_block(const TileRows& x, const TileSteps& s, int32_t* sums, TileSums& before) {
  const int64_t stride = x.stride, step = x.step, tile_bytes = s.tile_bytes, count = s.count;
  const bool first_use = s.first_use;
  const int8_t *x0 = s.x0, *x1 = s.x1, *w = s.w;
  // As many at each step that all are done by the last one.
  const int64_t even = (before.end - before.row) / count + 1, few = before.n > 0 ? kStepLines / before.n : 1;
  const int64_t rows = even > few ? even : few;
  sums_begin<T, R * N>();
  for (int64_t i = 0; i < count; ++i) {
    T::template load<4>(x0, stride);
    if constexpr (R == 2) T::template load<5>(x1, stride);
    tile_columns<T, R, N>(w, tile_bytes);
    if (first_use) {
      for (int c = 0; c < N; ++c)
        for (int l = 0; l < 16; ++l) __builtin_prefetch(w + c * tile_bytes + kTilePrefetch + l * 64, 0, 2);
    }
    if (before.row < before.end) finish_rows(x, before, rows);
    x0 += step;
    x1 += step;
    w += kTileBytes;
  }
  if (before.row < before.end) finish_rows(x, before, before.end - before.row);
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

  const int width = one ? 4 : 2;
  alignas(64) int32_t sums[4 * kTileInts];  // a block's are all finished before the next one stores its own
  TileSums before;
  for (int64_t tile = r.tile_begin; tile < r.tile_end; tile += width) {
    const int n = r.tile_end - tile < width ? int(r.tile_end - tile) : width;
    for (int64_t t = 0; t < x.tiles; t += 2) {
      const bool two = t + 1 < x.tiles;
      const TileSteps s = {x.x[t], x.x[two ? t + 1 : t], (const int8_t*)a.w + tile * tile_bytes, tile_bytes, steps, t == 0};
      if (two)
        tile_columns_pick<T, 2>(x, s, n, sums, before);
      else
        tile_columns_pick<T, 1>(x, s, n, sums, before);
      before.row = t * x.height;
      before.end = before.row + (two ? 2 : 1) * x.height < x.m ? before.row + (two ? 2 : 1) * x.height : x.m;
      before.line = sums + (before.row - x.first[t]) * 16;
      before.next_tile = two ? before.row + x.height : before.end;
      before.next_line = sums + n * kTileInts + (two ? (before.next_tile - x.first[t + 1]) * 16 : 0);
      before.tile = tile;
      before.n = n;
    }
  }
  T::release();
  finish_rows(x, before, before.end - before.row);
  if (a.stream_y) v_stream_end();
}

}  // namespace mi::kernels::MI_ISA
