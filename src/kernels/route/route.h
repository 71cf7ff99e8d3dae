#pragma once
// Router logits to chosen experts and combine weights (tensor/op.h, RouteParams, has the steps).
//
//   softmax  p_e = exp(l_e - max l) / sum, the sum in lanes e mod 16, then a fixed tree; sigmoid  p_e = 1 / (1 + exp(-l_e))
//   the sum of a renormalisation runs in ascending expert id, starting from 0
// Ties go to the lower id; a NaN score loses against every number. The same bits on every ISA.

#include <cstdint>

#include "hw/cpu.h"
#include "hw/thread_pool.h"
#include "tensor/op.h"

namespace mi::kernels {

struct RouteArgs {
  int64_t rows = 0;
  const float* logits = nullptr;       // [rows, experts], stride in bytes
  int64_t logits_stride = 0;
  const float* select_bias = nullptr;  // [experts], or none
  void* out = nullptr;                 // kRoute rows: int32 ids [k] ascending, float weights [k]
  int64_t out_stride = 0;
};
// Preconditions: 1 <= k <= experts; groups divides experts.
void route_rows(const RouteParams& p, const RouteArgs& a, int64_t begin, int64_t end, const hw::CpuFeatures& cpu = hw::cpu());
void route_run(const RouteParams& p, const RouteArgs& a, hw::ThreadPool& pool, const hw::CpuFeatures& cpu = hw::cpu());

}  // namespace mi::kernels
