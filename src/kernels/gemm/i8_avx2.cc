#include "kernels/gemm/i8_tile.h"

namespace mi::kernels {
namespace {

// x * w = sign(x, w) * |w|: |w| <= 128 as u8, sign(x, w) in [-127, 127] as s8, so the sum of two products is at most
// 2 * 128 * 127 = 32512 and vpmaddubsw never saturates.
struct Avx2 {
  using Reg = __m256i;
  static constexpr int kRegs = 2, kSums = 8, kBlockRows = 4,
                       kBlockTiles = 1;  // 8 sums, 2 weights, 2 |weights|, ones, 2 to work with
  static constexpr bool kShifted = false;
  static Reg load(const int8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
  static void store(int8_t* p, Reg v) { _mm256_storeu_si256((__m256i*)p, v); }
  static Reg broadcast(int32_t v) { return _mm256_set1_epi32(v); }
  static Reg zero() { return _mm256_setzero_si256(); }
  static Reg add(Reg a, Reg b) { return _mm256_add_epi32(a, b); }
  static Reg dot(Reg acc, Reg w, Reg x) {
    const Reg pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
};

}  // namespace

void gemm_i8_avx2(const GemmArgs& a, const GemmRange& r, void* scratch) { MI_ISA::i8_gemm<Avx2>(a, r, scratch); }

}  // namespace mi::kernels
