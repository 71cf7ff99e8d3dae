#include "kernels/gemm/i8_tile.h"

namespace mi::kernels {
namespace {

struct Vnni256 {
  using Reg = __m256i;
  static constexpr int kRegs = 2, kSums = 8, kBlockRows = 6, kBlockTiles = 1;  // 12 sums + 2 weights + 1 activation
  static constexpr bool kShifted = true;
  static Reg load(const int8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
  static void store(int8_t* p, Reg v) { _mm256_storeu_si256((__m256i*)p, v); }
  static Reg broadcast(int32_t v) { return _mm256_set1_epi32(v); }
  static Reg zero() { return _mm256_setzero_si256(); }
  static Reg add(Reg a, Reg b) { return _mm256_add_epi32(a, b); }
  static Reg shift(Reg v) { return _mm256_xor_si256(v, _mm256_set1_epi8(char(0x80))); }
  static Reg dot(Reg acc, Reg w, Reg x) { return _mm256_dpbusd_avx_epi32(acc, x, w); }
};

}  // namespace

void gemm_i8_avxvnni(const GemmArgs& a, const GemmRange& r, void* scratch) { MI_ISA::i8_gemm<Vnni256>(a, r, scratch); }

}  // namespace mi::kernels
