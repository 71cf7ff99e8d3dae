#include "tools/bench/share.h"

#include "tools/cost.h"

namespace mi::tools {

BenchShare bench_share(const artifact::Manifest& m, const Machine& machine, const BenchRow& row) {
  const bool prefill = row.metric == "prefill";
  const double tok_s = row.middle(&BenchRound::tok_s), streams = row.metric == "batch" ? double(row.n) : 1;
  const double ops = tok_s * token_ops(m, !prefill);
  const double bytes = prefill ? 0 : tok_s / streams * step_weight_bytes(m, streams);
  const bool int8 = mostly_int8(m);
  return {bytes / 1e9, ops / 1e9, limit_share(machine, bytes, int8 ? ops : 0, int8 ? 0 : ops, 1)};
}

}  // namespace mi::tools
