#include "kernels/gemm/i8_amx_tile.h"

namespace mi::kernels {
namespace {

// Up to this many rows a product does little but read its weights, and the AVX-512 VNNI path does that as fast as
// memory allows: in one stream, without tiles to configure, rows to bring together, sums that leave through memory, or
// the lower clock of a core that uses AMX. By arithmetic alone 4 rows are where the two meet: 1 KiB of weights takes
// VNNI 8 cycles a row, and AMX 16, for loading a tile and multiplying it.
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
