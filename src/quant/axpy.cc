#include "quant/axpy.h"

#include "hw/cpu.h"

namespace mi::quant {
namespace {

template <typename T>
[[gnu::always_inline]] inline void loop(T* __restrict to, const T* __restrict x, T a, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] -= a * x[i];
}

template <typename T>
void plain(T* to, const T* x, T a, int64_t n) {
  loop(to, x, a, n);
}
#if defined(__x86_64__)
template <typename T>
[[gnu::target("avx2")]] void avx2(T* to, const T* x, T a, int64_t n) {
  loop(to, x, a, n);
}
template <typename T>
[[gnu::target("avx512f,prefer-vector-width=512")]] void avx512(T* to, const T* x, T a, int64_t n) {
  loop(to, x, a, n);
}
#endif

// A tile stays in registers while the rows go by.
[[gnu::always_inline]] inline void products(float* h, const float* x, int64_t rows, int64_t k, int64_t i0) {
  typedef float Lanes [[gnu::vector_size(64), gnu::aligned(4), gnu::may_alias]];
  constexpr int64_t kParts = kGramColumns / 16;
  for (int64_t j = i0 / kGramColumns * kGramColumns; j < k; j += kGramColumns) {
    Lanes sum[kGramRows][kParts];
    for (int64_t i = 0; i < kGramRows; ++i)
      for (int64_t p = 0; p < kParts; ++p) sum[i][p] = *reinterpret_cast<const Lanes*>(h + (i0 + i) * k + j + 16 * p);
    for (int64_t r = 0; r < rows; ++r) {
      const float *a = x + r * k + i0, *b = x + r * k + j;
      Lanes v[kParts];
      for (int64_t p = 0; p < kParts; ++p) v[p] = *reinterpret_cast<const Lanes*>(b + 16 * p);
      for (int64_t i = 0; i < kGramRows; ++i)
        for (int64_t p = 0; p < kParts; ++p) sum[i][p] += v[p] * a[i];
    }
    for (int64_t i = 0; i < kGramRows; ++i)
      for (int64_t p = 0; p < kParts; ++p) *reinterpret_cast<Lanes*>(h + (i0 + i) * k + j + 16 * p) = sum[i][p];
  }
}

using Products = void(float*, const float*, int64_t, int64_t, int64_t);
void products_plain(float* h, const float* x, int64_t rows, int64_t k, int64_t i0) { products(h, x, rows, k, i0); }
#if defined(__x86_64__)
[[gnu::target("avx2")]] void products_avx2(float* h, const float* x, int64_t rows, int64_t k, int64_t i0) {
  products(h, x, rows, k, i0);
}
[[gnu::target("avx512f,prefer-vector-width=512")]] void products_avx512(float* h, const float* x, int64_t rows, int64_t k,
                                                                        int64_t i0) {
  products(h, x, rows, k, i0);
}
#endif

Products* choose_products() {
#if defined(__x86_64__)
  if (hw::cpu().avx512) return products_avx512;
  if (hw::cpu().avx2) return products_avx2;
#endif
  return products_plain;
}

template <typename T>
auto choose() {
#if defined(__x86_64__)
  if (hw::cpu().avx512) return avx512<T>;
  if (hw::cpu().avx2) return avx2<T>;
#endif
  return plain<T>;
}

}  // namespace

void subtract_scaled(float* to, const float* x, float a, int64_t n) {
  static const auto f = choose<float>();
  f(to, x, a, n);
}
void subtract_scaled(double* to, const double* x, double a, int64_t n) {
  static const auto f = choose<double>();
  f(to, x, a, n);
}

void add_products(float* h, const float* x, int64_t rows, int64_t k, int64_t i0) {
  static Products* const f = choose_products();
  f(h, x, rows, k, i0);
}

}  // namespace mi::quant
