#include "kernels/gemm/i4_tile.h"

namespace mi::kernels {
namespace {

struct Vnni512 {
  using Reg = __m512i;
  static constexpr int kRegs = 1, kBlockRows = 12;  // 12 sums, 12 floats, 2 halves, mask, activations
  static constexpr bool kFolds = false;
  static Reg load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static Reg broadcast(int32_t v) { return _mm512_set1_epi32(v); }
  static Reg zero() { return _mm512_setzero_si512(); }
  static Reg add(Reg a, Reg b) { return _mm512_add_epi32(a, b); }
  static Reg dot(Reg sum, Reg w, Reg x) { return _mm512_dpbusd_epi32(sum, w, x); }
  static Reg fold(Reg, Reg sum) { return sum; }
  static Reg low(Reg v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
  static Reg high(Reg v) { return low(_mm512_srli_epi16(v, 4)); }
};

}  // namespace

void gemm_i4_avx512vnni(const GemmArgs& a, const GemmRange& r, void* scratch) {
  MI_ISA::i4_gemm<Vnni512>(a, r, scratch);
}

}  // namespace mi::kernels
