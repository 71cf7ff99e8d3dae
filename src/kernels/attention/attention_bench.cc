// Attention over one layer, on one thread: prefill of a 512-token chunk at the end of a context, and one decode token.
// Reported: multiply-adds per second, and bytes of cache read per second.

#include <benchmark/benchmark.h>

#include "kernels/attention/attention.h"
#include "kernels/gemm/gemm.h"

namespace mi::kernels {
namespace {

// args: rows of the step, context length including them, heads, KV heads, KvKind, ISA (0 scalar, 1 avx2, 2 avx512, 3 avx512_bf16, 4 amx_bf16;
//       5 avx512 in the order of tiles)
void BM_Attention(benchmark::State& state) {
  const int64_t rows = state.range(0), context = state.range(1), dim = 128;
  AttentionParams p;
  p.heads = state.range(2);
  p.kv_heads = state.range(3);
  p.k_dim = p.v_dim = dim;
  p.scale = 0.09f;
  KvCache cache;
  cache.kind = KvKind(state.range(4));
  cache.kv_heads = p.kv_heads;
  cache.k_dim = cache.v_dim = dim;
  const bool plain_tiles = state.range(5) == 5;
  const int64_t isa = plain_tiles ? 2 : state.range(5);
  const hw::CpuFeatures cpu{.avx2 = isa >= 1, .avx512 = isa >= 2, .avx512_bf16 = isa >= 3, .amx_bf16 = isa >= 4 && hw::detect_cpu().amx_bf16};
  const int64_t pages = (context + 63) / 64;
  std::vector<std::byte> memory(size_t(pages * cache.page_bytes() + 64));
  cache.data = reinterpret_cast<std::byte*>((uintptr_t(memory.data()) + 63) / 64 * 64);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < pages; ++i) ids.push_back(int32_t(i));
  std::vector<float> q(size_t(rows * p.heads * dim), 0.1f), o(q.size());
  KvStep step;
  step.add({0, rows, context - rows, ids.data()});
  hw::ThreadPool pool(1);
  AttentionWorkspace ws;
  AttentionArgs a;
  a.cache = &cache;
  a.step = &step;
  a.order = attention_order(cache.kind, plain_tiles ? std::optional(SumOrder::kTiles) : std::nullopt, cpu);
  a.q = q.data();
  a.q_stride = a.o_stride = p.heads * dim * 4;
  a.o = o.data();
  for (auto _ : state) attention_run(p, a, ws, pool, cpu);
  const double pairs = double(rows) * double(context - rows) + double(rows) * double(rows + 1) / 2;
  state.counters["FMA"] = benchmark::Counter(pairs * double(p.heads * 2 * dim), benchmark::Counter::kIsIterationInvariantRate);
  state.counters["cache_bytes"] = benchmark::Counter(double(pages * cache.page_bytes()), benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(BM_Attention)
    ->ArgNames({"rows", "context", "heads", "kv_heads", "kind", "isa"})
    ->Args({512, 512, 8, 2, 1, 2})
    ->Args({512, 512, 8, 2, 1, 3})
    ->Args({512, 512, 8, 2, 1, 4})
    ->Args({512, 2048, 32, 4, 1, 2})
    ->Args({512, 2048, 32, 4, 1, 3})
    ->Args({512, 2048, 32, 4, 1, 4})
    ->Args({512, 2048, 32, 4, 1, 5})
    ->Args({1, 160, 32, 4, 1, 2})
    ->Args({1, 160, 32, 4, 1, 3})
    ->Args({1, 160, 32, 4, 1, 4})
    ->Args({512, 4096, 8, 2, 0, 2})
    ->Args({512, 4096, 8, 2, 1, 2})
    ->Args({512, 4096, 8, 2, 2, 2})
    ->Args({512, 4096, 8, 8, 1, 2})
    ->Args({512, 4096, 8, 2, 1, 1})
    ->Args({64, 512, 8, 2, 1, 0})
    ->Args({1, 4096, 8, 2, 0, 2})
    ->Args({1, 4096, 8, 2, 1, 2})
    ->Args({1, 4096, 8, 2, 1, 3})
    ->Args({1, 4096, 8, 2, 1, 4})
    ->Args({1, 4096, 8, 2, 2, 2})
    ->Args({1, 4096, 8, 8, 1, 2})
    ->Args({1, 4096, 8, 2, 1, 1})
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace mi::kernels
