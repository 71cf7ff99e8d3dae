#include "kernels/gemm/float_tile.h"

namespace mi::kernels {
namespace {

struct Float512 {
  using Reg = __m512;
  static constexpr int kRegs = 1, kSums = 24, kBlockRows = 6;
  static Reg zero() { return _mm512_setzero_ps(); }
  static Reg broadcast(float f) { return _mm512_set1_ps(f); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
};
struct WeightF32 {
  static constexpr int kGroup = 1;
  static __m512 load(const char* line, int, int) { return _mm512_loadu_ps(line); }
};
struct WeightBf16 {  // 32-bit lanes: k even in the low half, k odd in the high half
  static constexpr int kGroup = 2;
  static __m512 load(const char* line, int j, int) {
    const __m512i v = _mm512_loadu_si512(line);
    return _mm512_castsi512_ps(j == 0 ? _mm512_slli_epi32(v, 16)
                                      : _mm512_and_si512(v, _mm512_set1_epi32(int(0xffff0000))));
  }
};

}  // namespace

void gemm_f32_avx512(const GemmArgs& a, const GemmRange& r, void*) { MI_ISA::float_gemm<Float512, WeightF32>(a, r); }
void gemm_bf16_avx512(const GemmArgs& a, const GemmRange& r, void*) { MI_ISA::float_gemm<Float512, WeightBf16>(a, r); }

}  // namespace mi::kernels
