// Instructions on rows alone: each unpacks its operands and calls the kernel.

#include "exec/context.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/embed/embed.h"
#include "kernels/moe/activation.h"
#include "kernels/norm/norm.h"
#include "kernels/quantize/quantize.h"

namespace mi::exec {
namespace {

using artifact::Instr;
using artifact::Operand;

kernels::MapArgs map_args(const Context& c, const Operand& x, const Operand& y) {
  return {c.rows(y), y.type.cols, c.floats(x), c.stride(x), c.floats(y), c.stride(y)};
}

}  // namespace

void run_embed(Context& c, const Instr& i) {
  const Weight& w = *c.find(i, Role::kWeight);
  const Operand& y = i.out[0];
  kernels::embed_run({c.tokens, y.type.cols, c.ids.data(), w.data, w.info->dtype, std::get<EmbedParams>(i.params).scale, c.floats(y), c.stride(y)},
                     *c.pool);
}

void run_norm(Context& c, const Instr& i) {
  const Operand& x = i.in[0];
  kernels::RmsNormArgs a;
  a.rows = c.rows(x);
  a.cols = x.type.cols;
  a.x = c.floats(x);
  a.x_stride = c.stride(x);
  a.weight = c.vector(i, Role::kWeight);
  for (const Operand& y : i.out) {
    if (y.type.elem == Elem::kQ8) {
      a.q = c.at(y);
      a.q_stride = c.stride(y);
    } else {
      a.y = c.floats(y);
      a.y_stride = c.stride(y);
    }
  }
  kernels::rms_norm_run(std::get<NormParams>(i.params), a, *c.pool, c.cpu);
}

void run_quantize(Context& c, const Instr& i) {
  const Operand &x = i.in[0], &y = i.out[0];
  kernels::quantize_run(c.floats(x), c.stride(x), c.rows(x), x.type.cols, c.at(y), c.stride(y), *c.pool, c.cpu,
                        stored_scale(c, i, std::get<QuantizeParams>(i.params).saturate));
}

kernels::GemmArgs linear_args(const Context& c, const Instr& i) {
  const Weight& w = *c.find(i, Role::kWeight);
  const Operand &x = i.in[0], &y = i.out[0];
  kernels::GemmArgs a;
  a.m = c.rows(y);
  a.n = y.type.cols;
  a.k = x.type.cols;
  a.x = c.at(x);
  a.x_stride = c.stride(x);
  a.x_scale_offset = artifact::q8_scale_offset(c.stride(x));
  a.w = w.data;
  a.w_scale = w.scales;
  a.w_scale_bf16 = w.scales_bf16;
  a.group = w.info->group;
  a.w_colsum = w.colsums;
  a.bias = c.vector(i, Role::kBias);
  a.out_scale = std::get<LinearParams>(i.params).out_scale;
  if (i.residual >= 0) {
    const Operand& r = i.in[size_t(i.residual)];
    a.residual = c.floats(r);
    a.residual_stride = c.stride(r);
  }
  a.y = c.floats(y);
  a.y_stride = c.stride(y);
  return a;
}

void run_linear(Context& c, const Instr& i) {
  kernels::gemm_run(*c.gemm[size_t(gemm_format(*c.find(i, Role::kWeight)))], linear_args(c, i), *c.pool);
}

void run_rope(Context& c, const Instr& i, const kernels::RopeTable& table) {
  const Operand &x = i.in[0], &y = i.out[0];
  kernels::rope_run(std::get<RopeParams>(i.params), {c.tokens, c.floats(x), c.stride(x), c.positions.data(), &table, c.floats(y), c.stride(y)}, *c.pool);
}

void run_clamp(Context& c, const Instr& i) {
  const ClampParams& p = std::get<ClampParams>(i.params);
  kernels::clamp_run(map_args(c, i.in[0], i.out[0]), p.lo, p.hi, *c.pool);
}

void run_add(Context& c, const Instr& i) {
  kernels::add_run(map_args(c, i.in[0], i.out[0]), c.floats(i.in[1]), c.stride(i.in[1]), *c.pool);
}

void run_scale(Context& c, const Instr& i) {
  kernels::scale_run(map_args(c, i.in[0], i.out[0]), std::get<ScaleParams>(i.params).factor, *c.pool);
}

void run_activation(Context& c, const Instr& i) {
  const Operand &gate = i.in[0], &h = i.out[0];
  const bool joined = i.in.size() == 1;      // gate | up side by side
  const float* up = joined ? c.floats(gate) + h.type.cols : c.floats(i.in[1]);
  if (h.type.elem == Elem::kQ8)
    return kernels::activation_quantize_run(std::get<ActivationParams>(i.params), c.floats(gate), c.stride(gate), up, c.stride(joined ? gate : i.in[1]),
                                            c.rows(h), h.type.cols, c.at(h), c.stride(h), *c.pool, c.cpu);
  kernels::activation_run(std::get<ActivationParams>(i.params), c.floats(gate), c.stride(gate), up, c.stride(joined ? gate : i.in[1]), c.rows(h),
                          h.type.cols, c.floats(h), c.stride(h), *c.pool, c.cpu);
}

void run_sigmoid_mul(Context& c, const Instr& i) {
  kernels::sigmoid_mul_run(map_args(c, i.in[0], i.out[0]), c.floats(i.in[1]), c.stride(i.in[1]), *c.pool);
}

void run_select_rows(Context& c, const Instr& i) {
  const Operand &x = i.in[0], &y = i.out[0];
  kernels::select_rows(c.at(x), c.stride(x), c.logit_rows.data(), c.logit_count, y.type.elem == Elem::kQ8 ? c.stride(y) : y.type.cols * 4, c.at(y),
                       c.stride(y));
}

}  // namespace mi::exec
