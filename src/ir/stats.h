#pragma once
// Totals of a graph, for reports.

#include <string>
#include <vector>

#include "ir/graph.h"

namespace mi::ir {

// Weights of one mark and one format ("bf16", "w8a8", "w4a8_g128"), summed over layers. Bytes as stored in the MIR directory, scales
// of quantized matrices included; scales and constants (rope frequencies, activation scales) are no parameters.
struct WeightGroup {
  Mark mark = Mark::kNone;
  std::string format;
  int64_t params = 0, bytes = 0;
};

// What one token leaves in the cache of one layer, in elements; window > 0: only the last `window` tokens are read.
struct CacheStats {
  int64_t kv_heads = 0, k_dim = 0, v_dim = 0, index_dim = 0, window = 0;
  int64_t elements() const { return kv_heads * (k_dim + v_dim) + index_dim; }
};

struct GraphStats {
  int64_t total_params = 0;
  int64_t active_params =
      0;  // per token: of E experts k count; the head counts, an embedding table (looked up) does not
  int64_t weight_bytes = 0;
  std::vector<WeightGroup> groups;  // by mark, then format
  std::vector<CacheStats> caches;   // one per layer
  int64_t nodes = 0;                // summed over layers: a block of 57 layers counts 57 times

  int64_t kv_bytes_per_token(int64_t bytes_per_element) const;
};

// Precondition: verify(g).
GraphStats stats_of(const Graph& g);
int64_t count_nodes(const Graph& g);

}  // namespace mi::ir
