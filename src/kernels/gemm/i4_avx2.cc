#include "kernels/gemm/i4_tile.h"

namespace mi::kernels {
namespace {

// Two products of vpmaddubsw are at most 2 * 15 * 128 = 3840, so eight of them stay in int16 (30720) before they widen.
struct Avx2 {
  using Reg = __m256i;
  static constexpr int kRegs = 2, kBlockRows = 4;
  static constexpr bool kFolds = true;
  static Reg load(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
  static Reg broadcast(int32_t v) { return _mm256_set1_epi32(v); }
  static Reg zero() { return _mm256_setzero_si256(); }
  static Reg add(Reg a, Reg b) { return _mm256_add_epi32(a, b); }
  static Reg dot(Reg sum, Reg w, Reg x) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x)); }
  static Reg fold(Reg acc, Reg sum) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
  }
  static Reg low(Reg v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
  static Reg high(Reg v) { return low(_mm256_srli_epi16(v, 4)); }
};

}  // namespace

void gemm_i4_avx2(const GemmArgs& a, const GemmRange& r, void* scratch) { MI_ISA::i4_gemm<Avx2>(a, r, scratch); }

}  // namespace mi::kernels
