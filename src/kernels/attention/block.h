#pragma once
// Arguments of attention's inner kernels (block_kernels.h), which work on rows of one KV head and one page of 64 positions.
// Plain data: also read by the files with ISA suffixes.

#include <stdint.h>

namespace mi::kernels {

inline constexpr int64_t kBlock = 64;

// Keys or values of a page as stored; kind: 0 float, 1 bfloat16, 2 int8 with a scale per position, 3 bfloat16 in pairs.
struct StoredBlock {
  const void* data;
  const float* scales;
  int kind;
};

// Running softmax of `rows` rows: m, l [rows], o [rows][v_pad].
struct SoftmaxState {
  float* m;
  float* l;
  float* o;
};

struct BlockArgs {
  int64_t rows;
  const float* q;          // [rows][dim]
  int64_t dim;
  const float* keys;       // [dim][64]
  const float* values;     // [64][v_pad]
  // What a bfloat16 cache asks for: q holds bfloat16 numbers, dim is even, weights are rounded to bfloat16, and sums take pairs.
  bool pairs;
  // The same as bfloat16, keys and values as they are stored: what attn_block_bf16 reads in place of the three above.
  const uint16_t* q_bf16;
  const uint16_t* keys_bf16;
  const uint16_t* values_bf16;
  int64_t v_pad;
  const uint64_t* masks;   // [rows], bit j: position j takes part
  float scale, softcap;
  SoftmaxState state;
};

}  // namespace mi::kernels
