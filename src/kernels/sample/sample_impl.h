#pragma once
// Bodies of sample.h for one ISA; included once by each sample_<isa>.cc. Vectors are as wide as the ISA's registers
// (GCC splits wider ones of double badly); the operations and the order of the lanes are the same.

#include <stdint.h>
#include <string.h>

#include "kernels/simd.h"

namespace mi::kernels::MI_ISA {

#if defined(__AVX512F__)
static constexpr int kWide = 8;
#elif defined(__AVX2__)
static constexpr int kWide = 4;
#else
static constexpr int kWide = 2;
#endif
static constexpr int kSumLanes = 8, kBlock = 64;
typedef double Doubles __attribute__((vector_size(8 * kWide)));
typedef int64_t Ints __attribute__((vector_size(8 * kWide)));
typedef float Floats __attribute__((vector_size(4 * kWide)));
typedef float Full __attribute__((vector_size(8 * kWide)));

// exp(x) for x <= 0, about 1 ulp. libm's differs between CPUs (with and without FMA); this is adds, multiplies and
// shifts only. x = k ln 2 + r, |r| <= ln 2 / 2; Taylor up to r^13 leaves 4e-18. Below -708 (also -inf) it gives 0.
static inline Doubles exp_neg(Doubles x) {
  const double tiny = -708.0, round = 0x1.8p52;
  const int64_t round_bits = 0x4338000000000000;  // of round
  const Ints keep = x > tiny;
  x = keep ? x : Doubles{} + tiny;
  const Doubles shifted = x * 0x1.71547652b82fep0 + round;
  const Doubles k = shifted - round;
  const Doubles r = x - k * 0x1.62e42feep-1 - k * 0x1.a39ef35793c76p-33;
  Doubles p = Doubles{} + 1.0 / 6227020800.0;  // 1 / 13!, and down to 1 / 0!
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  const Ints power = ((Ints)shifted - round_bits + 1023) << 52;
  return (Doubles)((Ints)(p * (Doubles)power) & keep);
}

static inline double weigh_block(const float* row, double max, double scale, double* weights) {
  Doubles lanes[kSumLanes / kWide] = {};
  for (int i = 0; i < kBlock; i += kSumLanes)
    for (int j = 0; j < kSumLanes / kWide; ++j) {
      Floats f;
      memcpy(&f, row + i + j * kWide, sizeof f);
      const Doubles e = exp_neg((__builtin_convertvector(f, Doubles) - max) * scale);
      memcpy(weights + i + j * kWide, &e, sizeof e);
      lanes[j] += e;
    }
  double sum = 0;
  for (int j = 0; j < kSumLanes / kWide; ++j)
    for (int i = 0; i < kWide; ++i) sum += lanes[j][i];
  return sum;
}

void weigh_row_impl(const float* row, int64_t n, double max, double scale, double* weights, double* sums) {
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) sums[i / kBlock] = weigh_block(row + i, max, scale, weights + i);
  if (i == n) return;
  float last[kBlock];
  for (int64_t j = 0; j < kBlock; ++j) last[j] = i + j < n ? row[i + j] : -__builtin_inff();
  sums[i / kBlock] = weigh_block(last, max, scale, weights + i);
}

float max_of_row_impl(const float* row, int64_t n) {
  Full lanes = Full{} - __builtin_inff();
  int64_t i = 0;
  for (; i + 2 * kWide <= n; i += 2 * kWide) {
    Full x;
    memcpy(&x, row + i, sizeof x);
    lanes = x > lanes ? x : lanes;
  }
  float most = -__builtin_inff();
  for (int j = 0; j < 2 * kWide; ++j) most = lanes[j] > most ? lanes[j] : most;
  for (; i < n; ++i) most = row[i] > most ? row[i] : most;
  return most;
}

}  // namespace mi::kernels::MI_ISA
