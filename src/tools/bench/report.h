#pragma once
// What metainfer bench prints. The JSON lines are a protocol that other programs read: keys are added, never changed.
//
//   {"version": "metainfer 0.1.0", "load_s": 1.9}
//   {"metric": "prefill", "n": 512, "tok_s": 900.0, "ttft_s": 0.57, "tok_s_min": ..., "tok_s_max": ...,
//    "tok_s_rounds": [...], "gops": 1500.0, "bound": "arithmetic", "share": 0.41}
//   {"metric": "decode", "n": 128, "tok_s": 60.0, "ttft_s": 0.15, "total_tok_s": 56.0, ..., "gbs": 30.1, ...}
//   {"machine": {"cpu": ..., "isa": ..., "threads": 2, "limits": {...}}}
//   {"memory": {"peak_bytes": 3100000000}}        null where it cannot be told

#include <optional>

#include "tools/bench/share.h"

namespace mi::tools {

// share may be null.
Json bench_json(const BenchRow& r, const BenchShare* share);
// shares: by row, or empty.
std::string bench_table(const std::vector<BenchRow>& rows, const std::vector<BenchShare>& shares);

}  // namespace mi::tools
