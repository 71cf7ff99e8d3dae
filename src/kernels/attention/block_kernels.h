#pragma once
// The inner kernels of attention, one build per ISA (attention_impl.h).

#include "kernels/attention/block.h"
#include "kernels/dispatch.h"

// keys [dim][64] widened for the first n positions (n a multiple of 16).
MI_KERNEL(void, attn_widen_keys, (const StoredBlock& b, int64_t dim, int64_t n, float* out))
// values [64][v_pad] widened for the first n positions.
MI_KERNEL(void, attn_widen_values, (const StoredBlock& b, int64_t v_pad, int64_t n, float* out))
// One block's step of the online softmax.
MI_KERNEL(void, attn_block, (const BlockArgs& a))
// n numbers rounded to bfloat16, then zeros up to n_even, as floats, as bfloat16, or both.
MI_KERNEL(void, attn_round_row, (const float* x, int64_t n, int64_t n_even, float* out, uint16_t* out_bf16))
// acc = acc folded with `part`.
MI_KERNEL(void, attn_fold, (int64_t rows, int64_t v_pad, const SoftmaxState& acc, const SoftmaxState& part))
// out[row] = o / l, or 0 when nothing was attended to; sinks [rows] or none. out_rows: where each row's v_dim floats go.
MI_KERNEL(void, attn_finish, (int64_t rows, int64_t v_dim, int64_t v_pad, const SoftmaxState& s, const float* sinks, float* const* out_rows))
// best[row * stride + b] = max over positions j with mask bit of q.k, b = (first + j) / block - first / block;
// entries must be initialised. NaN is ignored.
MI_KERNEL(void, index_block, (int64_t rows, const float* q, int64_t dim, const float* keys, const uint64_t* masks, int64_t first, int64_t block, float* best, int64_t stride))

#if !defined(MI_SCALAR_ONLY)
namespace mi::kernels::avx512bf16 {
// attn_block in the order kPairs, of the bfloat16 operands.
void attn_block(const BlockArgs& a);
// Whether this CPU's vdpbf16ps is two fma, the second of each pair first, with denormals as zeros. Intel's manual says so and
// Zen 4 does; a CPU that computes otherwise gets the avx512 build.
bool dot_is_two_fma();
}  // namespace mi::kernels::avx512bf16
namespace mi::kernels::amx {
// attn_block in the order kTiles, of the bfloat16 operands, between attn_begin and attn_end on the same thread.
void attn_block(const BlockArgs& a);
int64_t attn_scratch_bytes(int64_t v_pad);
// Configures this thread's tiles for `height` rows, at most 16.
void attn_begin(int64_t height);
void attn_end();
// Whether this CPU's tdpbf16ps adds in the order kTiles: Intel's manual says so, and a Xeon with 480 MiB of L3 cache does. A CPU
// that computes otherwise gets the avx512 build.
bool dot_is_two_chains();
}  // namespace mi::kernels::amx
#endif
