#pragma once
// Matrix products with packed weights: the kernels' register, choice by CPU, and the split over threads. The formulas,
// and what each argument means, are in gemm/args.h.

#include <optional>
#include <span>
#include <string>

#include "base/result.h"
#include "hw/cpu.h"
#include "hw/thread_pool.h"
#include "kernels/gemm/args.h"
#include "kernels/gemm/pack.h"

namespace mi::kernels {

// One row of gemm/kernels.inc.
struct GemmKernel {
  const char* name;  // "gemm_i8_avx512vnni"
  GemmFormat format;
  const char* needs;  // CPU features in words, "" for the reference
  bool (*runs_on)(const hw::CpuFeatures&);
  GemmFn run;
};

std::span<const GemmKernel> gemm_kernels();  // best first within a format, the scalar reference last
// The first of the format that the CPU runs. MI_WITHOUT_KERNEL=gemm_i8_amx,... leaves kernels out, as if they had not been
// written: to see what falls back then, and what that costs.
const GemmKernel& select_gemm(GemmFormat format, const hw::CpuFeatures& cpu = hw::cpu());
bool gemm_left_out(const GemmKernel& k);
Status check_left_out(const std::string& names);  // refuses what is no kernel, and references

// Set when a format's products run on a slower kernel than they could: `better` was left out; or null where the reference
// runs because the CPU has nothing that the others need.
struct GemmFallback {
  const GemmKernel* chosen = nullptr;
  const GemmKernel* better = nullptr;
};
std::optional<GemmFallback> gemm_fallback(GemmFormat format, const hw::CpuFeatures& cpu = hw::cpu());
const GemmKernel& reference_gemm(GemmFormat format);

// Bytes of 16 packed columns, without scales.
constexpr int64_t gemm_tile_bytes(GemmFormat f, int64_t k) {
  const int64_t elements = kNTile * pad_k(k);
  return f == GemmFormat::kI4     ? elements / 2
         : f == GemmFormat::kI8   ? elements
         : f == GemmFormat::kBF16 ? 2 * elements
                                  : 4 * elements;
}
constexpr bool gemm_takes_q8(GemmFormat f) { return f == GemmFormat::kI8 || f == GemmFormat::kI4; }  // else float rows
const char* gemm_format_name(GemmFormat f);  // "int8", "bf16", "f32", "int4"
// int8: the rows, shifted. int4: the sums of the rows' groups.
constexpr int64_t gemm_scratch_bytes(int64_t k) { return kMaxRangeRows * pad_k(k) + 4096; }
// The calling thread's scratch of at least `bytes`; kept and only ever grown, so steady work allocates nothing.
void* thread_scratch(int64_t bytes);

// GemmArgs::stream_y for `rows` rows in all.
bool gemm_streams(const float* y, int64_t y_stride, int64_t rows);
// The whole product, split over the pool.
void gemm_run(const GemmKernel& kernel, const GemmArgs& a, hw::ThreadPool& pool);
// One part on the calling thread.
void gemm_range(const GemmKernel& kernel, const GemmArgs& a, const GemmRange& r);

}  // namespace mi::kernels
