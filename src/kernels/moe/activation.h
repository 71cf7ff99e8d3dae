#pragma once
// The gated activations, element by element:
//   kSilu        (g * sigmoid(g)) * u
//   kGelu        (g * (0.5 * (1 + erf(g * sqrt(1/2))))) * u
//   kGeluTanh    (g * (0.5 * (1 + tanh(sqrt(2/pi) * (g + 0.044715 g^3))))) * u
//   kRelu        max(g, 0) * u
//   kSwigluOai   g = min(g, limit), u = clamp(u, -limit, limit): (u + 1) * (g * sigmoid(alpha * g));
//                limit <= 0: no clamp
// The same bits on every ISA. h may be gate or up.

#include <cstdint>

#include "hw/cpu.h"
#include "hw/thread_pool.h"
#include "tensor/op.h"

namespace mi::kernels {

// Rows of `cols` floats, strides in bytes. For gate|up side by side in one row: up = gate + cols, same stride.
void activation_rows(const ActivationParams& p, const float* gate, int64_t gate_stride, const float* up,
                     int64_t up_stride, int64_t rows, int64_t cols, float* h, int64_t h_stride,
                     const hw::CpuFeatures& cpu = hw::cpu());
void activation_run(const ActivationParams& p, const float* gate, int64_t gate_stride, const float* up,
                    int64_t up_stride, int64_t rows, int64_t cols, float* h, int64_t h_stride, hw::ThreadPool& pool,
                    const hw::CpuFeatures& cpu = hw::cpu());
// The same rows quantized (quantize.h), each with its own scale; no row of floats is stored.
void activation_quantize_run(const ActivationParams& p, const float* gate, int64_t gate_stride, const float* up,
                             int64_t up_stride, int64_t rows, int64_t cols, void* q, int64_t q_stride,
                             hw::ThreadPool& pool, const hw::CpuFeatures& cpu = hw::cpu());

}  // namespace mi::kernels
