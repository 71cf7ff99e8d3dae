#pragma once
// How much the KV cache takes, as numbers and as words.

#include <cstdint>
#include <string>
#include <vector>

#include "artifact/types.h"
#include "kernels/attention/kv_cache.h"

namespace mi::compiler {

// 2 * layers * kv_heads * head_dim * seq * batch * bytes
constexpr int64_t kv_bytes(int64_t layers, int64_t kv_heads, int64_t head_dim, int64_t seq, int64_t batch,
                           int64_t bytes) {
  return 2 * layers * kv_heads * head_dim * seq * batch * bytes;
}
// The formula with its numbers and its total: "2 x 48 layers x 8 KV heads x 128 x 4096 tokens x 32 sequences x 1 byte
// = 12.88 GB".
std::string kv_plan_text(int64_t layers, int64_t kv_heads, int64_t head_dim, int64_t seq, int64_t batch, int64_t bytes);

// Bytes that all layers keep for one token as the executor stores them: keys, values (rows padded to 16), index keys,
// and the scales of int8.
int64_t stored_kv_bytes_per_token(const std::vector<artifact::LayerCache>& caches, kernels::KvKind kind);
// A model's plan: one line per form of layer, then totals for bf16 and int8 caches.
std::string kv_plan_text(const std::vector<artifact::LayerCache>& caches, int64_t seq, int64_t batch);

}  // namespace mi::compiler
