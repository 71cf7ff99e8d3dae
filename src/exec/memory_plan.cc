#include "exec/memory_plan.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "kernels/attention/kv_cache.h"

namespace mi::exec {
namespace {

constexpr int64_t kThreadScratch = int64_t(1) << 20;  // rows of gate and up beside quantized rows (kernels/moe/plan.h)

// Tables of cosines and sines. Layers usually share theirs; which ones have the same frequencies only the weights tell.
int64_t rope_bytes(const artifact::Manifest& m, int64_t positions) {
  std::set<std::tuple<int64_t, float>> tables;
  for (const artifact::Instr& i : m.program)
    if (const auto* p = std::get_if<RopeParams>(&i.params)) tables.emplace(p->rotary_dim, p->attention_factor);
  int64_t bytes = 0;
  for (const auto& [dim, factor] : tables) bytes += positions * dim * int64_t(sizeof(float));
  return bytes;
}

}  // namespace

int64_t kv_page_bytes(const artifact::Manifest& m, const std::string& kv_type) {
  const std::string& type = kv_type.empty() ? m.default_kv : kv_type;
  const kernels::KvKind kind = type == "f32" ? kernels::KvKind::kF32 : type == "int8" ? kernels::KvKind::kI8 : kernels::KvKind::kBF16;
  int64_t bytes = 0;
  for (const artifact::LayerCache& l : m.caches) bytes += kernels::KvCache{kind, l.kv_heads, l.k_dim, l.v_dim, l.index_dim}.page_bytes();
  return bytes;
}

MemoryPlan plan_memory(const artifact::Manifest& m, const LoadOptions& o, int threads) {
  MemoryPlan p;
  p.weights = m.memory.weight_bytes;
  if (o.expert_cache_bytes > 0) {
    const WeightDivision w = divide_weights(m);
    p.weights = w.kept;
    p.expert_cache = std::min(o.expert_cache_bytes, w.experts);
  }
  p.kv = kv_page_bytes(m, o.kv_type) * o.kv_pages;
  const int64_t rows = o.max_tokens_per_step > 0 ? o.max_tokens_per_step : step_tokens(m.memory.activation_bytes_per_token);
  p.activations = m.memory.activation_bytes_per_token * rows;
  int64_t positions = o.kv_pages * artifact::kKvPageTokens;
  if (m.model.max_positions > 0) positions = std::min(positions, m.model.max_positions);
  p.workspace = rope_bytes(m, positions) + kThreadScratch * threads;
  return p;
}

}  // namespace mi::exec
