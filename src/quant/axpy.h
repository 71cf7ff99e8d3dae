#pragma once
// to[i] -= a * x[i]: the inner loop of Gram matrices, factorizations and error spreading. Every element is computed
// alone, product and difference each rounded, so that any width of vectors gives the same bits.

#include <cstdint>

namespace mi::quant {

void subtract_scaled(float* to, const float* x, float a, int64_t n);
void subtract_scaled(double* to, const double* x, double a, int64_t n);

// h[i][j] += sum over rows of x[r][i] * x[r][j], in the order of the rows, for i in [i0, i0 + kGramRows) and j from the
// tile of i0 on: the upper half and a little more. x [rows, k] and h [k, k]; k is a multiple of kGramColumns.
inline constexpr int64_t kGramRows = 4, kGramColumns = 32;
void add_products(float* h, const float* x, int64_t rows, int64_t k, int64_t i0);

}  // namespace mi::quant
