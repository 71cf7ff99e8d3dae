#include "kernels/gemm/i8_amx_tile.h"

namespace mi::kernels {
namespace {

// Up to this many rows a product does little but read its weights, and the AVX-512 VNNI path does that as fast as
// memory allows: in one stream, without tiles to configure, rows to bring together, sums that leave through memory, or
// the lower clock of a core that uses AMX. By arithmetic alone 4 rows are where the two meet: 1 KiB of weights takes
// VNNI 8 cycles a row, and AMX 16, for loading a tile and multiplying it.
constexpr int64_t kVnniRows = 4;

struct AmxI8 : MI_ISA::Amx {
  template <int c, int a, int b>
  static void dot() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
  }
};

}  // namespace

void gemm_i8_avx512vnni(const GemmArgs& a, const GemmRange& r, void* scratch);

void gemm_i8_amx(const GemmArgs& a, const GemmRange& r, void* scratch) {
  if (r.m_end - r.m_begin <= kVnniRows) return gemm_i8_avx512vnni(a, r, scratch);
  MI_ISA::tile_gemm<AmxI8>(a, r, scratch);
}

}  // namespace mi::kernels
