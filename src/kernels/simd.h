#pragma once
// Sixteen float lanes with the same bits on every ISA. A float kernel is written once against this header and compiled
// several times (file suffixes _scalar, _avx2, _avx512: kernels/arch_flags.cmake); GCC lowers the 64-byte vectors to what the
// flags allow. Every operation is an IEEE operation per lane (+, -, *, /, sqrt, fused multiply-add), reductions have one
// fixed tree, so the variants agree bit for bit. (scalar: fma through libm, slow but exact.)
//
// Everything is in a namespace named after the ISA, and static: inline code compiled with wider flags must never be
// merged by the linker with code for a plain CPU. For the same reason files with an ISA suffix use raw pointers only, no
// containers or other templates of the standard library.

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#  include <immintrin.h>
#  define MI_ISA avx512
#elif defined(__AVX2__)
#  include <immintrin.h>
#  define MI_ISA avx2
#else
#  define MI_ISA scalar
#endif

namespace mi::kernels::MI_ISA {

typedef float V16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));

static inline V16 v_set(float f) { return V16{f, f, f, f, f, f, f, f, f, f, f, f, f, f, f, f}; }
static inline V16 v_zero() { return v_set(0.0f); }
static inline V16 v_load(const float* p) { V16 v; memcpy(&v, p, 64); return v; }
static inline void v_store(float* p, V16 v) { memcpy(p, &v, 64); }
// Past the caches where the ISA can; p is 64-byte aligned. v_stream_end() before another thread is told.
static inline void v_stream(float* p, V16 v) {
#if defined(__AVX512F__)
  __m512 x;
  memcpy(&x, &v, 64);
  _mm512_stream_ps(p, x);
#else
  v_store(p, v);
#endif
}
static inline void v_stream_end() {
#if defined(__AVX512F__)
  _mm_sfence();
#endif
}
// First n lanes (0..16); the others are `fill`.
static inline V16 v_load_n(const float* p, int64_t n, float fill = 0.0f) {
  float t[16];
  for (int i = 0; i < 16; ++i) t[i] = i < n ? p[i] : fill;
  return v_load(t);
}
static inline void v_store_n(float* p, V16 v, int64_t n) {
  float t[16];
  v_store(t, v);
  for (int64_t i = 0; i < n; ++i) p[i] = t[i];
}
// 16 bfloat16 widened.
static inline V16 v_load_bf16(const uint16_t* p) {
  I16 r;
#if defined(__AVX512F__)
  __m512i x = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
  memcpy(&r, &x, 64);
#else
  for (int i = 0; i < 16; ++i) r[i] = int32_t(uint32_t(p[i]) << 16);
#endif
  return (V16)r;
}
// a * b + c rounded once.
static inline V16 v_fma(V16 a, V16 b, V16 c) {
#if defined(__AVX512F__)
  return (V16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  union U { V16 v; __m256 h[2]; } ua{a}, ub{b}, uc{c}, r;
  r.h[0] = _mm256_fmadd_ps(ua.h[0], ub.h[0], uc.h[0]);
  r.h[1] = _mm256_fmadd_ps(ua.h[1], ub.h[1], uc.h[1]);
  return r.v;
#else
  V16 r;
  for (int i = 0; i < 16; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#endif
}
// Rounded to nearest even, in the low halves of the lanes. NaN stays NaN.
static inline I16 v_to_bf16(V16 a) {
  const U16 x = (U16)a;
  return (I16)((x & 0x7fffffff) > 0x7f800000 ? (x >> 16) | 0x40 : (x + (0x7fff + ((x >> 16) & 1))) >> 16);
}
// The lane of b when unordered. GCC 12 makes two instructions of the plain form.
#if defined(__AVX512F__)
static inline V16 v_min(V16 a, V16 b) { return (V16)_mm512_min_ps((__m512)a, (__m512)b); }
static inline V16 v_max(V16 a, V16 b) { return (V16)_mm512_max_ps((__m512)a, (__m512)b); }
#else
static inline V16 v_min(V16 a, V16 b) { return a < b ? a : b; }
static inline V16 v_max(V16 a, V16 b) { return a > b ? a : b; }
#endif
static inline V16 v_abs(V16 a) { return (V16)((I16)a & 0x7fffffff); }
static inline V16 v_sqrt(V16 a) {
#if defined(__AVX512F__)
  return (V16)_mm512_sqrt_ps((__m512)a);
#else
  V16 r;
  for (int i = 0; i < 16; ++i) r[i] = __builtin_sqrtf(a[i]);
  return r;
#endif
}
// Fixed trees: lanes i and i+8, then +4, +2, +1; of two lanes the maximum is a > b ? a : b.
#if defined(__AVX2__)
static inline float v_sum(V16 v) {
  union U { V16 v; __m256 h[2]; } u{v};
  __m256 a = _mm256_add_ps(u.h[0], u.h[1]);
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
#else
static inline float v_sum(V16 v) {
  float t[16];
  v_store(t, v);
  for (int w = 8; w >= 1; w >>= 1)
    for (int i = 0; i < w; ++i) t[i] = t[i] + t[i + w];
  return t[0];
}
#endif
#if defined(__AVX2__)
static inline float v_max_lane(V16 v) {
  union U { V16 v; __m256 h[2]; } u{v};
  __m256 a = _mm256_max_ps(u.h[0], u.h[1]);
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
#else
static inline float v_max_lane(V16 v) {
  float t[16];
  v_store(t, v);
  for (int w = 8; w >= 1; w >>= 1)
    for (int i = 0; i < w; ++i) t[i] = t[i] > t[i + w] ? t[i] : t[i + w];
  return t[0];
}
#endif
// Nearest integer, ties to even, for |a| < 2^22.
static inline V16 v_round(V16 a) {
  const V16 magic = v_set(12582912.0f);
  return (a + magic) - magic;
}
static inline I16 v_to_int(V16 integral) { return __builtin_convertvector(integral, I16); }
// Lanes in [-128, 127] to 16 bytes.
static inline void v_store_i8(int8_t* p, I16 v) {
#if defined(__AVX512F__)
  __m512i x;
  memcpy(&x, &v, 64);
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x));
#else
  int32_t t[16];
  memcpy(t, &v, 64);
  for (int i = 0; i < 16; ++i) p[i] = (int8_t)t[i];
#endif
}

// exp(x), relative error below 2e-7 for x in [-87, 88]; below: 0, above: clamped at x = 88. Range reduction by ln 2 in two
// parts, polynomial of degree 6 (Taylor-like minimax coefficients as in Cephes expf).
// N vectors at once, step by step: a chain is too long for what the scheduler of a core holds.
template <bool kBelow, int N>
static inline void exp_each(V16 (&x)[N]) {
  const V16 lo = v_set(-87.0f), magic = v_set(12582912.0f);
  V16 n[N], p[N], square[N];
#if defined(__AVX512F__)
  __mmask16 seen[N];
  for (int i = 0; i < N; ++i) seen[i] = _mm512_cmp_ps_mask((__m512)x[i], (__m512)lo, _CMP_NLT_UQ);
#else
  V16 under[N];
  for (int i = 0; i < N; ++i) under[i] = x[i] < lo ? v_zero() : v_set(1.0f);
#endif
  for (int i = 0; i < N; ++i) x[i] = v_max(x[i], lo);
  if (!kBelow)
    for (int i = 0; i < N; ++i) x[i] = v_min(x[i], v_set(88.0f));
  for (int i = 0; i < N; ++i) n[i] = x[i] * v_set(1.44269504088896341f);
  for (int i = 0; i < N; ++i) n[i] = n[i] + magic;
  for (int i = 0; i < N; ++i) n[i] = n[i] - magic;    // v_round
  for (int i = 0; i < N; ++i) x[i] = v_fma(n[i], v_set(-0.693359375f), x[i]);
  for (int i = 0; i < N; ++i) x[i] = v_fma(n[i], v_set(2.12194440e-4f), x[i]);
  for (int i = 0; i < N; ++i) p[i] = v_fma(v_set(1.9875691500e-4f), x[i], v_set(1.3981999507e-3f));
  for (int i = 0; i < N; ++i) square[i] = x[i] * x[i];
  for (int i = 0; i < N; ++i) p[i] = v_fma(p[i], x[i], v_set(8.3334519073e-3f));
  for (int i = 0; i < N; ++i) p[i] = v_fma(p[i], x[i], v_set(4.1665795894e-2f));
  for (int i = 0; i < N; ++i) p[i] = v_fma(p[i], x[i], v_set(1.6666665459e-1f));
  for (int i = 0; i < N; ++i) p[i] = v_fma(p[i], x[i], v_set(5.0000001201e-1f));
  for (int i = 0; i < N; ++i) x[i] = v_fma(p[i], square[i], x[i]);
  for (int i = 0; i < N; ++i) x[i] = x[i] + v_set(1.0f);
  for (int i = 0; i < N; ++i)
#if defined(__AVX512F__)
    x[i] = (V16)_mm512_maskz_scalef_ps(seen[i], (__m512)x[i], (__m512)n[i]);   // x * 2^n, which is never denormal
#else
    x[i] = x[i] * (V16)((v_to_int(n[i]) + 127) << 23) * under[i];
#endif
}
template <bool kBelow>
static inline V16 exp_of(V16 x) {
  V16 one[1] = {x};
  exp_each<kBelow>(one);
  return one[0];
}
static inline V16 v_exp(V16 x) { return exp_of<false>(x); }
// The same for x that are at most 88, or NaN.
static inline V16 v_exp_below(V16 x) { return exp_of<true>(x); }
static inline V16 v_sigmoid(V16 x) { return v_set(1.0f) / (v_set(1.0f) + v_exp(-x)); }
// tanh, absolute error below 1e-7: an odd polynomial (Cephes tanhf) below 0.625, else 1 - 2 / (exp(2|x|) + 1).
static inline V16 v_tanh(V16 x) {
  V16 a = v_abs(x), s = x * x;
  V16 p = v_set(-5.70498872745e-3f);
  p = v_fma(p, s, v_set(2.06390887954e-2f));
  p = v_fma(p, s, v_set(-5.37397155531e-2f));
  p = v_fma(p, s, v_set(1.33314422036e-1f));
  p = v_fma(p, s, v_set(-3.33332819422e-1f));
  V16 small = v_fma(p * s, x, x);
  V16 big = v_set(1.0f) - v_set(2.0f) / (v_exp(a + a) + v_set(1.0f));
  big = x < v_zero() ? -big : big;
  return a > v_set(0.625f) ? big : small;    // NaN takes the polynomial and stays NaN
}
// erf, absolute error below 1.5e-7: x P(x^2) below 1, else 1 - exp(-Q(|x|)); minimax fits of our own.
static inline V16 v_erf(V16 x) {
  V16 a = v_abs(x), s = x * x;
  V16 p = v_set(7.889119297e-5f);
  p = v_fma(p, s, v_set(-8.020841051e-4f));
  p = v_fma(p, s, v_set(5.189535208e-3f));
  p = v_fma(p, s, v_set(-2.685444430e-2f));
  p = v_fma(p, s, v_set(1.128360033e-1f));
  p = v_fma(p, s, v_set(-3.761262596e-1f));
  p = v_fma(p, s, v_set(1.128379107f));
  V16 small = p * x;
  V16 b = v_min(a, v_set(4.0f));             // erf(4) rounds to 1
  V16 q = v_set(2.169763866e-5f);
  q = v_fma(q, b, v_set(-4.414729192e-4f));
  q = v_fma(q, b, v_set(4.205286037e-3f));
  q = v_fma(q, b, v_set(-2.521034144e-2f));
  q = v_fma(q, b, v_set(1.084221005e-1f));
  q = v_fma(q, b, v_set(6.332163811e-1f));
  q = v_fma(q, b, v_set(1.129580259f));
  q = v_fma(q, b, v_set(-1.884678059e-4f));
  V16 big = v_set(1.0f) - v_exp(-q);
  big = x < v_zero() ? -big : big;
  return a > v_set(1.0f) ? big : small;
}

static inline float s_exp(float x) { return v_exp(v_set(x))[0]; }
static inline float s_sigmoid(float x) { return v_sigmoid(v_set(x))[0]; }
static inline float s_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

}  // namespace mi::kernels::MI_ISA
