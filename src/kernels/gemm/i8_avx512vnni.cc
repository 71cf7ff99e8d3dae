#include "kernels/gemm/i8_tile.h"

namespace mi::kernels {
namespace {

struct Vnni512 {
  using Reg = __m512i;
  static constexpr int kRegs = 1, kSums = 16, kBlockRows = 6, kBlockTiles = 4;  // 24 sums + 4 weights + 1 activation
  static constexpr bool kShifted = true;
  static Reg load(const int8_t* p) { return _mm512_loadu_si512(p); }
  static void store(int8_t* p, Reg v) { _mm512_storeu_si512(p, v); }
  static Reg broadcast(int32_t v) { return _mm512_set1_epi32(v); }
  static Reg zero() { return _mm512_setzero_si512(); }
  static Reg add(Reg a, Reg b) { return _mm512_add_epi32(a, b); }
  static Reg shift(Reg v) { return _mm512_xor_si512(v, _mm512_set1_epi8(char(0x80))); }
  static Reg dot(Reg acc, Reg w, Reg x) { return _mm512_dpbusd_epi32(acc, x, w); }
};

}  // namespace

void gemm_i8_avx512vnni(const GemmArgs& a, const GemmRange& r, void* scratch) {
  MI_ISA::i8_gemm<Vnni512>(a, r, scratch);
}

}  // namespace mi::kernels
