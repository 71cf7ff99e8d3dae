#pragma once
// to[i] -= a * x[i]: the inner loop of Gram matrices, factorizations and error spreading. Every element is computed
// alone, product and difference each rounded, so that any width of vectors gives the same bits.

#include <cstdint>

namespace mi::quant {

void subtract_scaled(float* to, const float* x, float a, int64_t n);
void subtract_scaled(double* to, const double* x, double a, int64_t n);

}  // namespace mi::quant
