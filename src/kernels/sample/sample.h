#pragma once
// Passes over one row of logits, as choosing a token needs them. The same bits on every build.

#include <cstdint>

#include "hw/cpu.h"

namespace mi::kernels {

inline constexpr int64_t kWeightBlock = 64;

inline constexpr int64_t weight_blocks(int64_t n) { return (n + kWeightBlock - 1) / kWeightBlock; }

// The largest of row[0, n); -inf if there is none. NaN is never the largest.
float max_of_row(const float* row, int64_t n, const hw::CpuFeatures& cpu);

// weights[i] = exp((row[i] - max) * scale), about 1 ulp; 0 where that is below exp(-708), so also for -inf. weights has
// room for whole blocks of kWeightBlock and is 0 behind the row. sums[b] is the sum of block b: eight lanes, lane =
// index mod 8, joined from left to right. Preconditions: max finite and not below any row[i]; scale > 0.
void weigh_row(const float* row, int64_t n, double max, double scale, double* weights, double* sums,
               const hw::CpuFeatures& cpu);

}  // namespace mi::kernels
