#include <immintrin.h>
#include <string.h>

#include "kernels/probe/args.h"

namespace mi::kernels {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes_per_row[16];
  uint8_t rows[16];
};

}  // namespace

// Four sums of 16 x 16, each round all of them with two left and two right tiles: 4 * 16 * 16 * 64 multiply-adds.
int64_t probe_int8_amx(const ProbeWork& w) {
  TileConfig config;
  memset(&config, 0, sizeof config);
  config.palette = 1;
  for (int i = 0; i < 8; ++i) {
    config.bytes_per_row[i] = 64;
    config.rows[i] = 16;
  }
  // GCC 12's _tile_loadconfig names 8 bytes of the configuration as its input and _tile_loadd none of the tile: stores
  // to the rest may be dropped. So the whole structure is an operand, and the ones are in memory before they are
  // loaded.
  __asm__ volatile("ldtilecfg %0" : : "m"(config));
  alignas(64) int8_t ones[16 * 64];
  memset(ones, 1, sizeof ones);
  __asm__ volatile("" : : "r"(ones) : "memory");
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, ones, 64);
  _tile_loadd(5, ones, 64);
  _tile_loadd(6, ones, 64);
  _tile_loadd(7, ones, 64);
  for (int64_t i = 0; i < w.loops; ++i) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  alignas(64) int32_t sums[4][16 * 16];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
  _tile_release();
  __asm__ volatile("" : : "r"(sums) : "memory");
  int64_t total = 0;
  for (const auto& tile : sums)
    for (int32_t v : tile) total += v;
  return total;
}

}  // namespace mi::kernels
