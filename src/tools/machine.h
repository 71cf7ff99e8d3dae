#pragma once
// The machine that figures were measured on: what they may be compared with, and what bounds them.

#include <optional>
#include <string>

#include "base/json.h"
#include "base/result.h"
#include "hw/thread_pool.h"
#include "kernels/probe/probe.h"

namespace mi::tools {

struct Machine {
  std::string cpu, isa;  // "AMD EPYC 9B14", "avx2 avx512 avx512_vnni"
  int threads = 0;
  std::optional<kernels::MachineLimits> limits;  // none: not probed
};

// probe: also measures the limits (about a second, see kernels/probe/probe.h). Without, figures have no share of a
// limit.
Result<Machine> describe_machine(hw::ThreadPool& pool, bool probe);

Json machine_json(const Machine& m);
// What machine_json() wrote; `what` names the source in errors.
Result<Machine> parse_machine(const Json& j, const std::string& what);
// "machine  AMD EPYC, 2 threads, avx2 ...\nlimits  read 35.1 GB/s (28.9 with one thread), ...\n"
std::string machine_text(const Machine& m);

// A sentence that says what differs, with a way out, when figures of the two cannot be compared; "" when they can.
// Memory bandwidth is compared in classes: a factor of kBandwidthClass apart is another machine, or a busy one.
inline constexpr double kBandwidthClass = 1.5;
std::string machine_difference(const Machine& now, const Machine& then);

// The tighter of two bounds, and how much of it was reached.
enum class Bound { kNone, kMemory, kArithmetic };
struct LimitShare {
  Bound bound = Bound::kNone;
  double share = 0;  // 1: all that the probe measured
};
// bytes and operations that took `seconds`, with the pool's threads. kNone without limits, or with nothing to bound.
LimitShare limit_share(const Machine& m, double bytes, double int8_ops, double float_ops, double seconds,
                       double bf16_ops = 0);
const char* bound_name(Bound b);  // "memory", "arithmetic", "-"

}  // namespace mi::tools
