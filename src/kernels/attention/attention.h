#pragma once
// Attention over the paged cache, and the block index that selects what it attends to. Keys and values of a step are
// appended first and then read back from the cache like all others, so how a prompt was cut into chunks leaves no trace.
//
// A row (token, head) is computed from its own query and the cache alone:
//   s_j  = (sum over d ascending of q_d k_jd, one fma chain from 0) * scale, then softcap * tanh(s_j / softcap)
//   positions in blocks of 64, ascending: m' = max(m, max s_j); p_j = exp(s_j - m'); c = exp(m - m')
//     l = l c + sum p_j (fixed tree); o = o c, then fma over the block's positions, ascending
//   blocks are folded into splits of kSplitTokens positions (absolute multiples), splits into the result, ascending:
//     M' = max(M, m): L = L exp(M - M') + l exp(m - M'), O likewise
//   sink: the denominator gains exp(sink - M'); result O / L
// With a bfloat16 cache q is rounded to bfloat16, and so is p_j in o (not in l); both products are added in one of two other
// orders (SumOrder, block.h), which AVX-512 BF16 and AMX have instructions for:
//   kPairs    the fma chain takes d, and positions, in the order 1 0 3 2 5 4 ..
//   kTiles    s and o gain one sum for each 32 of d, and of the block's positions
// Masked positions (after the row, outside the window, in blocks not selected) have p = 0 and change no bit. So the result
// depends on neither the batch, chunking, threads nor, within an order, the ISA, although long contexts are computed by
// several threads.

#include <cstdint>
#include <optional>
#include <vector>

#include "hw/cpu.h"
#include "hw/thread_pool.h"
#include "kernels/attention/block.h"
#include "kernels/attention/kv_cache.h"
#include "kernels/rope/rope.h"
#include "tensor/op.h"

namespace mi::kernels {

inline constexpr int64_t kSplitTokens = 1024;

// Lists of tasks and partial results; grows to what steps need and is then reused. One per engine.
struct AttentionWorkspace {
  struct Task {
    int32_t chunk = 0, token = 0, tokens = 0;   // rows [token, token + tokens) of the chunk
    int32_t kv_head = 0;
    int32_t split_begin = 0, split_end = 0;     // splits to compute
    int64_t partial = -1;                       // offset in partials; -1: the task computes all splits and the result
  };
  std::vector<Task> tasks, merges;
  std::vector<float> partials;
  std::vector<float> block_scores;
};

struct KvAppendArgs {
  const KvCache* cache = nullptr;
  const KvStep* step = nullptr;
  const float* k = nullptr;            // [rows, kv_heads * k_dim], strides in bytes
  int64_t k_stride = 0;
  const float* v = nullptr;            // [rows, kv_heads * v_dim]
  int64_t v_stride = 0;
  // Keys are rotated first (rope.h, of kv_heads heads of k_dim) by the positions of the rows; null: they are stored as they are.
  const RopeTable* rope_table = nullptr;
  RopeParams rope;
  const int32_t* positions = nullptr;  // [rows]
};
// int8: each (row, head) is quantized as quantize_rows does.
void kv_append_run(const KvAppendArgs& a, hw::ThreadPool& pool, const hw::CpuFeatures& cpu = hw::cpu());
// x: [rows, index_dim]
void index_append_run(const KvCache& cache, const KvStep& step, const float* x, int64_t x_stride, hw::ThreadPool& pool);

struct AttentionArgs {
  const KvCache* cache = nullptr;
  const KvStep* step = nullptr;
  SumOrder order = SumOrder::kAscending;   // kPairs or kTiles with a bfloat16 cache
  const float* q = nullptr;            // [rows, heads * k_dim]
  int64_t q_stride = 0;
  const float* sinks = nullptr;        // [heads], or none
  const int32_t* selection = nullptr;  // [rows, kv_heads * topk], ascending block ids, then -1; or none
  int64_t selection_stride = 0, topk = 0;
  float* o = nullptr;                  // [rows, heads * v_dim]
  int64_t o_stride = 0;
};
void attention_run(const AttentionParams& p, const AttentionArgs& a, AttentionWorkspace& ws, hw::ThreadPool& pool,
                   const hw::CpuFeatures& cpu = hw::cpu());

const char* sum_order_name(SumOrder order);   // "ascending", "pairs", "tiles"
// The order for such a cache: with bfloat16 what was asked for, or kTiles where AMX computes it and kPairs elsewhere.
SumOrder attention_order(KvKind kind, std::optional<SumOrder> asked, const hw::CpuFeatures& cpu);
// Whether this CPU has an instruction that multiplies bfloat16 in this order (kPairs: avx512_bf16, kTiles: amx_bf16); without
// it the bits are the same.
bool attention_uses_bf16(SumOrder order, const hw::CpuFeatures& cpu);

// tensor/op.h, IndexSelectParams. A NaN score counts as -inf.
struct IndexSelectArgs {
  const KvCache* cache = nullptr;
  const KvStep* step = nullptr;
  const float* q = nullptr;            // [rows, heads * dim]
  int64_t q_stride = 0;
  int32_t* selection = nullptr;        // [rows, heads * topk]
  int64_t selection_stride = 0;
};
void index_select_run(const IndexSelectParams& p, const IndexSelectArgs& a, AttentionWorkspace& ws, hw::ThreadPool& pool,
                      const hw::CpuFeatures& cpu = hw::cpu());

}  // namespace mi::kernels
