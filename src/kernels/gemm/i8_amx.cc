#include "kernels/gemm/i8_amx_tile.h"

namespace mi::kernels {
namespace {

// Up to this many rows a product only reads its weights, which the AVX-512 VNNI path does as fast as memory allows, in
// one stream and without tiles to configure, rows to bring together, sums through memory, or the lower clock that a
// core takes for AMX. (A VNNI core at 390 GOPS and 13 GB/s is bound by memory up to 15 rows; but weights that come
// from a cache cost it 8 cycles a row and KiB against the 16 of a tile's loads and product: the lines cross soon.)
constexpr int64_t kVnniRows = 4;

// Instructions as text: GCC 12's intrinsics name neither what a tile load reads nor more than 8 of ldtilecfg's 64 bytes
// as inputs, so stores to them could move or vanish.
struct Amx {
  static void configure(const MI_ISA::TileConfig& c) { __asm__ volatile("ldtilecfg %0" : : "m"(c)); }
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
  template <int c, int a, int b>
  static void dot() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
  }
};

}  // namespace

void gemm_i8_avx512vnni(const GemmArgs& a, const GemmRange& r, void* scratch);

void gemm_i8_amx(const GemmArgs& a, const GemmRange& r, void* scratch) {
  if (r.m_end - r.m_begin <= kVnniRows) return gemm_i8_avx512vnni(a, r, scratch);
  MI_ISA::tile_gemm<Amx>(a, r, scratch);
}

}  // namespace mi::kernels
