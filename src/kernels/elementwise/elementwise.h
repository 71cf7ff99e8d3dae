#pragma once
// Ops that touch each element once: add, scale, clamp, multiply by a gate's sigmoid, pick rows. Strides in bytes; the
// result may be an operand. Plain code, bound by memory (rope.h has the reason); a gate's sigmoid is one value per row.

#include <cstdint>

#include "hw/thread_pool.h"

namespace mi::kernels {

struct MapArgs {
  int64_t rows = 0, cols = 0;
  const float* x = nullptr;
  int64_t x_stride = 0;
  float* y = nullptr;
  int64_t y_stride = 0;
};

// y = a.x + b
void add_run(const MapArgs& a, const float* b, int64_t b_stride, hw::ThreadPool& pool);
// y = x * factor
void scale_run(const MapArgs& a, float factor, hw::ThreadPool& pool);
// y = min(max(x, lo), hi); a NaN stays
void clamp_run(const MapArgs& a, float lo, float hi, hw::ThreadPool& pool);
// y = x * sigmoid(gate), gate: one column. sigmoid(g) = 1 / (1 + exp(-g)) with the exponential of kernels/simd.h.
void sigmoid_mul_run(const MapArgs& a, const float* gate, int64_t gate_stride, hw::ThreadPool& pool);
// y[i] = x[index[i]], rows of `bytes` bytes
void select_rows(const void* x, int64_t x_stride, const int32_t* index, int64_t rows, int64_t bytes, void* y, int64_t y_stride);

}  // namespace mi::kernels
