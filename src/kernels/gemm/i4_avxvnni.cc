#include "kernels/gemm/i4_tile.h"

namespace mi::kernels {
namespace {

struct Vnni256 {
  using Reg = __m256i;
  static constexpr int kRegs = 2, kBlockRows = 4;
  static constexpr bool kFolds = false;
  static Reg load(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
  static Reg broadcast(int32_t v) { return _mm256_set1_epi32(v); }
  static Reg zero() { return _mm256_setzero_si256(); }
  static Reg add(Reg a, Reg b) { return _mm256_add_epi32(a, b); }
  static Reg dot(Reg sum, Reg w, Reg x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
  static Reg fold(Reg, Reg sum) { return sum; }
  static Reg low(Reg v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
  static Reg high(Reg v) { return low(_mm256_srli_epi16(v, 4)); }
};

}  // namespace

void gemm_i4_avxvnni(const GemmArgs& a, const GemmRange& r, void* scratch) { MI_ISA::i4_gemm<Vnni256>(a, r, scratch); }

}  // namespace mi::kernels
