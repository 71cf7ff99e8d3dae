#include "kernels/gemm/i8_amx_tile.h"

namespace mi::kernels {
namespace {

// Up to this many rows a product does little but read its weights, and the AVX-512 VNNI path does that as fast as
// memory allows: in one stream, without tiles to configure, rows to bring together or sums that leave through memory.
// Two threads of a Xeon, 2048 x 2048, GB/s by VNNI and by tiles: 28 and 27 with one row, 27 and 26 with two, 22 and 26
// with four.
constexpr int64_t kVnniRows = 2;

}  // namespace

void gemm_i8_avx512vnni(const GemmArgs& a, const GemmRange& r, void* scratch);

void gemm_i8_amx(const GemmArgs& a, const GemmRange& r, void* scratch) {
  if (r.m_end - r.m_begin <= kVnniRows) return gemm_i8_avx512vnni(a, r, scratch);
  MI_ISA::tile_gemm<MI_ISA::AmxI8>(a, r, scratch);
}

}  // namespace mi::kernels
