#pragma once
// Arguments of attention's inner kernels (block_kernels.h), which work on rows of one KV head and one page of 64 positions.
// Plain data: also read by the files with ISA suffixes.

#include <stdint.h>

namespace mi::kernels {

inline constexpr int64_t kBlock = 64;

// The order in which the sums of both products are added, each operation rounded to nearest even (attention.h).
//   kAscending  one fma chain, ascending
//   kPairs      one fma chain in the order 1 0 3 2 5 4 ..: what vdpbf16ps computes
//   kTiles      by groups of 32: an fma chain from 0 over the even ones and one over the odd ones, sum = sum + (even + odd):
//               what tdpbf16ps computes
// The last two are for numbers of bfloat16, and denormal operands and results count as zeros.
enum class SumOrder : uint8_t { kAscending, kPairs, kTiles };

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
  // All but kAscending: q holds bfloat16 numbers, dim is even, and weights are rounded to bfloat16.
  SumOrder order;
  // The same as bfloat16, keys and values as they are stored: what the kernels read that multiply bfloat16, in place of the
  // three above. amx: rows of q have dim rounded up to 32, with zeros behind it.
  const uint16_t* q_bf16;
  const uint16_t* keys_bf16;
  const uint16_t* values_bf16;
  int64_t height;          // amx: rows of a tile, of which `rows` is a multiple
  int64_t filled;          // amx: positions of the page that were appended, counted from its first
  uint16_t* scratch;       // amx: attn_scratch_bytes
  int64_t v_pad;
  const uint64_t* masks;   // [rows], bit j: position j takes part
  float scale, softcap;
  SoftmaxState state;
};

}  // namespace mi::kernels
