#pragma once
// Rotary position embedding from tables that are computed once at load.
//
//   angle = float(pos) * inv_freq[i]          rounded to float, as the reference does
//   c, s  = cos(angle), sin(angle)            in double, rounded to float, then times attention_factor in float
//   half:        y_i = x_i c - x_{i+h} s,     y_{i+h} = x_{i+h} c + x_i s       h = rotary_dim / 2
//   interleaved: the same for the pair (x_2i, x_2i+1)
// Columns from rotary_dim on are copied. Plain code: the loops are bound by memory, and every operation rounds once, so
// there is nothing to gain from more lanes and no difference between ISAs.

#include <cstdint>
#include <vector>

#include "hw/thread_pool.h"
#include "tensor/op.h"

namespace mi::kernels {

struct RopeTable {
  int64_t positions = 0, half = 0;
  std::vector<float> cos, sin;         // [positions, half]
};
// inv_freq: [rotary_dim / 2].
RopeTable make_rope_table(const float* inv_freq, int64_t rotary_dim, float attention_factor, int64_t positions);

struct RopeArgs {
  int64_t rows = 0;
  const float* x = nullptr;            // [rows, heads * head_dim], strides in bytes
  int64_t x_stride = 0;
  const int32_t* positions = nullptr;  // [rows], each below table->positions
  const RopeTable* table = nullptr;
  float* y = nullptr;                  // may be x
  int64_t y_stride = 0;
};
void rope_rows(const RopeParams& p, const RopeArgs& a, int64_t begin, int64_t end);
void rope_run(const RopeParams& p, const RopeArgs& a, hw::ThreadPool& pool);

}  // namespace mi::kernels
