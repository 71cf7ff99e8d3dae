#pragma once
// How much of the machine's limit a measured speed is.
//
//   prefill        2 * active weights * tok/s over the best int8 rate (engines whose products are mostly float: over
//                  the float rate); attention and the output head are not counted
//   decode, batch  weight bytes that a step must read * steps per second over the read bandwidth, a batch of b touching
//                  E (1 - (1 - k/E)^b) experts; or 2 * active weights * tok/s over the arithmetic rate where that share
//                  is the larger: the tighter bound counts

#include "artifact/types.h"
#include "tools/bench/measure.h"
#include "tools/machine.h"

namespace mi::tools {

struct BenchShare {
  double gbs = 0;    // weight bytes read per second, in units of 1e9; 0: prefill
  double gops = 0;   // operations per second in products with weights, in units of 1e9
  LimitShare limit;  // kNone without limits
};
BenchShare bench_share(const artifact::Manifest& m, const Machine& machine, const BenchRow& row);

}  // namespace mi::tools
