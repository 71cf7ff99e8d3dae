#pragma once
// For the tools' tests: a machine with round limits.

#include "tools/machine.h"

namespace mi::tools::testing {

inline Machine machine() {
  Machine m{"Test CPU", "avx2 avx512", 2, kernels::MachineLimits{}};
  m.limits->threads = 2;
  m.limits->read_gbs = {"probe_read_avx512", 25, 40};
  m.limits->int8_gops = {"probe_int8_avx512vnni", 500, 1000};
  m.limits->f32_gflops = {"probe_f32_avx512", 100, 200};
  m.limits->bf16_gflops = {"probe_bf16_avx512bf16", 200, 400};
  return m;
}

}  // namespace mi::tools::testing
