#pragma once
// What the probe's kernels do; plain data, also read by the files with ISA suffixes.
//
//   kRead         reads [data, data + bytes) once and returns the sum of its 64-bit words, wrapping
//   kInt8, kF32, kBF16 (products of bfloat16)
//                 `loops` rounds of multiply-adds of ones, in enough independent chains to keep the units busy,
//                 operands in registers; returns the sum of all accumulators. Every product is 1, so this is the
//                 number of multiply-adds that were done, counted by the arithmetic itself.

#include <stdint.h>

namespace mi::kernels {

enum class ProbeKind : uint8_t { kRead, kInt8, kF32, kBF16 };

struct ProbeWork {
  const void* data = nullptr;  // 64-byte aligned
  int64_t bytes = 0;           // a multiple of kProbeReadUnit
  int64_t loops = 0;           // at most kProbeMaxLoops
};

inline constexpr int64_t kProbeReadUnit = 4096;
inline constexpr int64_t kProbeMaxLoops = int64_t(1) << 24;  // a float counts that far, an int32 counts 64 a round

using ProbeFn = int64_t (*)(const ProbeWork& w);

}  // namespace mi::kernels
