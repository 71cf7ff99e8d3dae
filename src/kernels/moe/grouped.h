#pragma once
// Mixture-of-experts kernels: the single ops (expert_linear, expert_combine) and the fused chain (grouped_experts),
// which returns the same bits. Tokens are sorted by expert, so each expert's weights are read once per block of its
// tokens; work is handed out in (expert, row block, column block) pieces, so that a skewed routing leaves no thread
// idle. Everything is computed per row, so a token's result does not depend on the other tokens of the step.

#include <cstdint>
#include <span>

#include "hw/cpu.h"
#include "hw/thread_pool.h"
#include "kernels/gemm/gemm.h"
#include "kernels/quantize/stored_scale.h"
#include "tensor/op.h"

namespace mi::kernels {

// Where one expert's matrix lies, and when it is int4 its scales [pad_n(n)/16][groups][16], in one of two types.
struct ExpertPlace {
  const void* w = nullptr;
  const float* scale = nullptr;
  const uint16_t* scale_bf16 = nullptr;
};

// E packed matrices [n, k], each as artifact::WeightTensor describes it.
struct ExpertWeights {
  GemmFormat format = GemmFormat::kF32;
  int64_t experts = 0, n = 0, k = 0;
  const ExpertPlace* places = nullptr;  // [E]; of experts that are not asked for they may be anything
  const float* scale = nullptr;         // int8: [E][pad_n(n)]
  int64_t group = 0;                // int4
  const int32_t* colsum = nullptr;  // int8: [E][pad_n(n)]
  const float* bias = nullptr;      // [E][n] with bias_stride floats between experts, or none
  int64_t bias_stride = 0;
};

// Rows of kRoute: int32 ids [k] (ascending, each in [0, E)), then float weights [k].
struct RouteRows {
  const void* data = nullptr;
  int64_t stride = 0;  // bytes
  int64_t k = 0;
  const int32_t* ids(int64_t t) const {
    return reinterpret_cast<const int32_t*>(static_cast<const char*>(data) + t * stride);
  }
  const float* weights(int64_t t) const { return reinterpret_cast<const float*>(ids(t) + k); }
};

// y[pair] = W[e] x + b[e]. Pairs are token-major: pair t * k + j is token t with its j-th expert. x: kQ8 rows for int8 and
// int4 weights, else float rows; one per token, or one per pair (x_per_pair). Arithmetic as in gemm/args.h.
struct ExpertLinearArgs {
  int64_t tokens = 0;
  RouteRows route;
  ExpertWeights w;
  const void* x = nullptr;
  int64_t x_stride = 0, x_scale_offset = 0;
  bool x_per_pair = false;
  float* y = nullptr;  // [tokens * k, n]
  int64_t y_stride = 0;
  std::span<const int32_t> only;  // the pairs of these experts and no others; empty: all
};
void expert_linear(const ExpertLinearArgs& a, hw::ThreadPool& pool, const hw::CpuFeatures& cpu = hw::cpu());

// out[t] = (((0 + w_0 * y_0) + w_1 * y_1) + ...) [+ residual[t]], each operation rounded; the order is that of the
// route row. residual may be out.
struct ExpertCombineArgs {
  int64_t tokens = 0, cols = 0;
  RouteRows route;
  const float* y = nullptr;  // [tokens * k, cols]
  int64_t y_stride = 0;
  const float* residual = nullptr;
  int64_t residual_stride = 0;
  float* out = nullptr;
  int64_t out_stride = 0;
};
void expert_combine(const ExpertCombineArgs& a, hw::ThreadPool& pool, const hw::CpuFeatures& cpu = hw::cpu());

// h = act(W_gate[e] x + b, W_up[e] x + b), quantized per pair as in quantize.h when the down weights are int8 or int4,
// by h_scale; y = W_down[e] h + b; combined as above. gate and up have one format; down may have another.
struct GroupedExpertsArgs {
  int64_t tokens = 0;
  RouteRows route;
  ExpertWeights gate, up, down;  // [I, H], [I, H], [H, I]
  ActivationParams act;
  const void* x = nullptr;  // rows per token: kQ8 when gate and up are int8 or int4, else float
  int64_t x_stride = 0, x_scale_offset = 0;
  const float* residual = nullptr;  // may be out
  int64_t residual_stride = 0;
  float* out = nullptr;
  int64_t out_stride = 0;
  void* scratch = nullptr;  // tokens * grouped_scratch_bytes_per_token, 64-byte aligned
  StoredScale h_scale;
};
void grouped_experts(const GroupedExpertsArgs& a, hw::ThreadPool& pool, const hw::CpuFeatures& cpu = hw::cpu());

// The same in parts, for experts that are not all in memory at once: products for some experts at a time (empty: all),
// each expert that a token chose once, in any order; then the sum of what they left in scratch.
void grouped_products(const GroupedExpertsArgs& a, std::span<const int32_t> only, hw::ThreadPool& pool,
                      const hw::CpuFeatures& cpu = hw::cpu());
void grouped_sum(const GroupedExpertsArgs& a, hw::ThreadPool& pool, const hw::CpuFeatures& cpu = hw::cpu());

// Scratch of grouped_experts for one token with k experts; linear in tokens; a multiple of 64. hidden = H, inter = I.
int64_t grouped_scratch_bytes_per_token(int64_t k, int64_t hidden, int64_t inter, GemmFormat down);

}  // namespace mi::kernels
