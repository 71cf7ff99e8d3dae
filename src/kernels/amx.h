#pragma once
// A matrix unit with tiles (Intel AMX): its configuration, and the instructions that all its kernels share.

#include "kernels/simd.h"

namespace mi::kernels::MI_ISA {

// What ldtilecfg reads: 64 bytes, all of them (Intel SDM vol. 2, LDTILECFG).
struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);
// Eight tiles of 64-byte rows, the first `low` of them with `height` rows, the others with 16.
static inline TileConfig tile_config(int low = 0, int64_t height = 16) {
  TileConfig c = {};
  c.palette = 1;
  for (int t = 0; t < 8; ++t) {
    c.row_bytes[t] = 64;
    c.rows[t] = uint8_t(t < low ? height : 16);
  }
  return c;
}

// Instructions as text: GCC 12's intrinsics name neither what a tile load reads nor more than 8 of ldtilecfg's 64 bytes
// as inputs, so stores to them could move or vanish.
struct Amx {
  static void configure(const TileConfig& c) { __asm__ volatile("ldtilecfg %0" : : "m"(c)); }
  static void release() { __asm__ volatile("tilerelease"); }
  template <int t>
  static void zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(t));
  }
  template <int t>
  static void load(const void* p, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(t) : "memory");
  }
  template <int t>
  static void store(void* p, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(t) : "memory");
  }
};
struct AmxI8 : Amx {
  template <int c, int a, int b>
  static void dot() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
  }
};
struct AmxBF16 : Amx {
  template <int c, int a, int b>
  static void dot() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
  }
};

}  // namespace mi::kernels::MI_ISA
