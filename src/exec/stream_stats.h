#pragma once
// What streaming experts from disk did so far.

#include <cstdint>

namespace mi::exec {

struct StreamStats {
  int64_t experts = 0, held = 0;       // of all layers; for how many there is room
  int64_t hits = 0, misses = 0;        // wanted experts that were in memory, that were not (or still on their way)
  int64_t prefetched = 0, prefetch_used = 0;   // read ahead, and of those wanted afterwards
  int64_t reads = 0, bytes_read = 0;
  int64_t waited_ns = 0;               // the step had nothing else to do
  double hit_rate() const { return hits + misses > 0 ? double(hits) / double(hits + misses) : 0; }
};

}  // namespace mi::exec
