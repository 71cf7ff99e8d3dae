#pragma once
// What this CPU can do, each feature on its own (never one asked for another). MI_FORCE_ISA=scalar|avx2|avx512|avx512vnni|amx
// caps the ladder; an unknown value is refused at start. AMX counts as present only after the kernel granted it.

#include <string>

#include "base/result.h"

namespace mi::hw {

struct CpuFeatures {
  bool avx2 = false;         // with FMA and F16C
  bool avx_vnni = false;
  bool avx512 = false;       // F, BW, DQ, VL
  bool avx512_vnni = false;
  bool avx512_bf16 = false;
  bool amx_int8 = false, amx_bf16 = false;
};

CpuFeatures detect_cpu();                                     // the machine, unforced
Result<CpuFeatures> apply_force(CpuFeatures f, const std::string& force);   // "" leaves f
// detect_cpu() capped by MI_FORCE_ISA; computed once. A bad value was refused by check_force_env() at start.
const CpuFeatures& cpu();
Status check_force_env();
std::string describe(const CpuFeatures& f);                   // "avx2 avx512 avx512_vnni"
std::string cpu_model_name();

}  // namespace mi::hw
