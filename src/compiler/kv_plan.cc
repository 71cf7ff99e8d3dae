#include "compiler/kv_plan.h"

#include <fmt/format.h>

#include <map>
#include <tuple>

#include "base/util.h"

namespace mi::compiler {

std::string kv_plan_text(int64_t layers, int64_t kv_heads, int64_t head_dim, int64_t seq, int64_t batch,
                         int64_t bytes) {
  return fmt::format("2 x {} layers x {} KV heads x {} x {} tokens x {} sequences x {} {} = {}", layers, kv_heads,
                     head_dim, seq, batch, bytes, bytes == 1 ? "byte" : "bytes",
                     human_bytes(double(kv_bytes(layers, kv_heads, head_dim, seq, batch, bytes))));
}

int64_t stored_kv_bytes_per_token(const std::vector<artifact::LayerCache>& caches, kernels::KvKind kind) {
  int64_t page = 0;
  for (const auto& c : caches) page += kernels::KvCache{kind, c.kv_heads, c.k_dim, c.v_dim, c.index_dim}.page_bytes();
  return page / kernels::kPageTokens;
}

std::string kv_plan_text(const std::vector<artifact::LayerCache>& caches, int64_t seq, int64_t batch) {
  using Form = std::tuple<int64_t, int64_t, int64_t>;
  std::map<Form, int64_t> forms;  // kv_heads, k_dim, v_dim -> layers
  int64_t index_keys = 0, index_layers = 0;
  for (const auto& c : caches) {
    if (c.kv_heads > 0) ++forms[{c.kv_heads, c.k_dim, c.v_dim}];
    if (c.index_dim > 0) {
      index_keys += c.index_dim;
      ++index_layers;
    }
  }
  std::string out;
  for (const auto& [form, layers] : forms) {
    const auto [heads, k, v] = form;
    if (k == v) {
      out += fmt::format("  bf16: {}\n  int8: {}\n", kv_plan_text(layers, heads, k, seq, batch, 2),
                         kv_plan_text(layers, heads, k, seq, batch, 1));
    } else {
      const int64_t elems = layers * heads * (k + v) * seq * batch;
      out += fmt::format("  {} layers x {} KV heads x ({} + {}) x {} tokens x {} sequences = {} in bf16, {} in int8\n",
                         layers, heads, k, v, seq, batch, human_bytes(double(elems * 2)), human_bytes(double(elems)));
    }
  }
  if (index_layers > 0)
    out += fmt::format("  index keys of {} layers: {} in bf16\n", index_layers,
                       human_bytes(double(index_keys * seq * batch * 2)));
  const int64_t bf16 = stored_kv_bytes_per_token(caches, kernels::KvKind::kBF16),
                int8 = stored_kv_bytes_per_token(caches, kernels::KvKind::kI8);
  out += fmt::format("  total as stored: bf16 {} ({} per token), int8 with its scales {} ({} per token)\n",
                     human_bytes(double(bf16 * seq * batch)), human_bytes(double(bf16)),
                     human_bytes(double(int8 * seq * batch)), human_bytes(double(int8)));
  return out;
}

}  // namespace mi::compiler
