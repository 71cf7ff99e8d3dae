#pragma once
// One step's work: chunks of token rows, one chunk per sequence that takes part. Filled by runtime (or a tool), run by
// exec. Row order is chunk order. Nothing in a sequence's result depends on the other chunks of the batch.

#include <cstdint>
#include <span>
#include <vector>

namespace mi::exec {

struct Chunk {
  std::span<const int32_t> tokens;   // ids of positions start .. start + tokens.size() - 1; not empty
  int64_t start = 0;                 // number of tokens of this sequence already in the cache
  std::span<const int32_t> pages;    // KV page ids, page i holds positions [i*64, (i+1)*64); covers start + tokens.size(); those before start may be other chunks', too
  int64_t logits_from = 0;           // logits are computed for rows logits_from .. of the chunk; tokens.size(): none
};

struct Batch {
  std::vector<Chunk> chunks;
};

}  // namespace mi::exec
