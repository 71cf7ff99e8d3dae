#pragma once
// What this machine can do at most, measured in about a second with the pool's threads and with one: read bandwidth
// from memory, int8 and float arithmetic. Each figure is the fastest of several short runs: what other programs take
// away meanwhile is not part of a limit. What is measured here bounds every kernel of this program.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "hw/cpu.h"
#include "hw/thread_pool.h"
#include "kernels/probe/args.h"

namespace mi::kernels {

// One row of probe/kernels.inc.
struct ProbeKernel {
  const char* name;  // "probe_int8_avx512vnni"
  ProbeKind kind;
  const char* needs;  // CPU features in words, "" for plain x86-64
  bool (*runs_on)(const hw::CpuFeatures&);
  ProbeFn run;
};
std::span<const ProbeKernel> probe_kernels();  // best first within a kind

struct ProbeRate {
  std::string kernel;       // the one that was fastest with all threads
  double one = 0, all = 0;  // with one thread, with the pool's
};

struct MachineLimits {
  int threads = 0;
  ProbeRate read_gbs;   // 1e9 bytes per second
  ProbeRate int8_gops;  // 1e9 operations per second, a multiply and an add are two
  ProbeRate f32_gflops;
  ProbeRate bf16_gflops;  // pairs or tiles of bfloat16; f32_gflops where no instruction multiplies them
  int64_t buffer_bytes = 0, cache_bytes = 0;  // what was read; the machine's last-level caches, 0: unknown
  double seconds = 0;                         // the probe itself
  std::vector<std::string> notes;             // what makes a figure doubtful, in sentences
};

struct ProbeOptions {
  hw::CpuFeatures cpu = hw::cpu();  // kernels are taken for it
  int64_t buffer_bytes = 0;         // 0: probe_buffer_bytes()
  double run_seconds = 0.015;       // one of the short runs
};

// Memory to read: 512 MB or four times the caches, whichever is more; at most a quarter of what is available.
int64_t probe_buffer_bytes(int64_t cache_bytes, int64_t available_bytes);

// The buffer is gone when this returns. Error (kEnvironment): no memory for it.
Result<MachineLimits> probe_machine(hw::ThreadPool& pool, const ProbeOptions& o = {});

}  // namespace mi::kernels
