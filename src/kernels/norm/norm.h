#pragma once
// RMS norm, over the whole row or over equal groups of its columns (a norm per head).
//
//   s = sum of x_j^2 over the group          four chains of sixteen lanes, fixed tree
//   r = 1 / sqrt(s / n + eps)                n = cols / groups
//   y = (x * r) * w                          w[j mod n]; with plus_one: 1 + w
// Each operation rounds once (the squares are accumulated with fma). The same bits on every ISA.

#include <cstdint>

#include "hw/cpu.h"
#include "hw/thread_pool.h"
#include "tensor/op.h"

namespace mi::kernels {

struct RmsNormArgs {
  int64_t rows = 0, cols = 0;
  const float* x = nullptr;      // strides in bytes
  int64_t x_stride = 0;
  const float* weight = nullptr; // [cols / groups]
  float* y = nullptr;            // float result, or none; may be x
  int64_t y_stride = 0;
  void* q = nullptr;             // kQ8 rows of the result, or none: the bits of norm, then quantize_rows
  int64_t q_stride = 0;
};

void rms_norm_rows(const NormParams& p, const RmsNormArgs& a, int64_t begin, int64_t end, const hw::CpuFeatures& cpu = hw::cpu());
void rms_norm_run(const NormParams& p, const RmsNormArgs& a, hw::ThreadPool& pool, const hw::CpuFeatures& cpu = hw::cpu());

}  // namespace mi::kernels
