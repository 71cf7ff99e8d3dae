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

}  // namespace mi::quant
