#include "kernels/gemm/float_tile.h"

namespace mi::kernels {
namespace {

struct Float256 {
  using Reg = __m256;
  static constexpr int kRegs = 2, kSums = 10, kBlockRows = 5;
  static Reg zero() { return _mm256_setzero_ps(); }
  static Reg broadcast(float f) { return _mm256_set1_ps(f); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
};
struct WeightF32 {
  static constexpr int kGroup = 1;
  static __m256 load(const char* line, int, int h) { return _mm256_loadu_ps((const float*)line + h * 8); }
};
struct WeightBf16 {  // 32-bit lanes: k even in the low half, k odd in the high half
  static constexpr int kGroup = 2;
  static __m256 load(const char* line, int j, int h) {
    const __m256i v = _mm256_loadu_si256((const __m256i*)line + h);
    return _mm256_castsi256_ps(j == 0 ? _mm256_slli_epi32(v, 16)
                                      : _mm256_and_si256(v, _mm256_set1_epi32(int(0xffff0000))));
  }
};

}  // namespace

void gemm_f32_avx2(const GemmArgs& a, const GemmRange& r, void*) { MI_ISA::float_gemm<Float256, WeightF32>(a, r); }
void gemm_bf16_avx2(const GemmArgs& a, const GemmRange& r, void*) { MI_ISA::float_gemm<Float256, WeightBf16>(a, r); }

}  // namespace mi::kernels
