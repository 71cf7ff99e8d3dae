// Instructions of a mixture of experts.

#include <algorithm>

#include "artifact/expert_reads.h"
#include "exec/context.h"
#include "kernels/route/route.h"

namespace mi::exec {
namespace {

using artifact::Instr;
using artifact::Operand;

kernels::RouteRows route_rows(const Context& c, const Operand& r) { return {c.at(r), c.stride(r), r.type.cols}; }

kernels::ExpertWeights expert_weights(const Context& c, const Instr& i, Role role, Role bias_role) {
  const Weight& w = *c.find(i, role);
  kernels::ExpertWeights e;
  e.format = gemm_format(w);
  e.experts = w.info->experts;
  e.n = w.info->n;
  e.k = w.info->k;
  e.places = w.experts.data();
  e.scale = w.scales;
  e.group = w.info->group;
  e.colsum = w.colsums;
  if (const Weight* b = c.find(i, bias_role)) {
    e.bias = b->floats();
    e.bias_stride = b->info->expert_stride / 4;
  }
  return e;
}

// Runs f for some experts at a time, whose matrices are then in memory: all that the step chose, each once.
template <typename F>
void each_streamed_part(Context& c, const Instr& i, const Operand& route, F f) {
  const kernels::RouteRows r = route_rows(c, route);
  c.wanted.clear();
  for (int64_t t = 0; t < c.tokens; ++t) c.wanted.insert(c.wanted.end(), r.ids(t), r.ids(t) + r.k);
  std::sort(c.wanted.begin(), c.wanted.end());
  c.wanted.erase(std::unique(c.wanted.begin(), c.wanted.end()), c.wanted.end());
  c.stream->each_part(size_t(c.stream_group[c.index(i)]), c.wanted, [&](std::span<const int32_t> experts) {
    // Only now that what this layer needs is being read.
    if (!c.foreseen_groups.empty()) c.stream->prefetch(c.foreseen_groups, c.foreseen);
    c.foreseen_groups.clear();
    place_streamed(c, i, experts);
    f(experts);
  });
}

}  // namespace

kernels::ExpertPlace expert_place(const artifact::WeightTensor& w, const std::byte* matrix, const std::byte* scales) {
  if (!artifact::has_scale_matrix(w)) return {matrix, nullptr, nullptr};
  if (w.scale_dtype == DType::kBF16) return {matrix, nullptr, reinterpret_cast<const uint16_t*>(scales)};
  return {matrix, reinterpret_cast<const float*>(scales), nullptr};
}

void run_route(Context& c, const Instr& i) {
  const Operand &x = i.in[0], &r = i.out[0];
  kernels::route_run(std::get<RouteParams>(i.params), {c.tokens, c.floats(x), c.stride(x), c.vector(i, Role::kSelectBias), c.at(r), c.stride(r)}, *c.pool,
                     c.cpu);
}

void run_expert_linear(Context& c, const Instr& i) {
  const Operand &x = i.in[0], &y = i.out[0];
  kernels::ExpertLinearArgs a;
  a.tokens = c.tokens;
  a.route = route_rows(c, i.in[1]);
  a.w = expert_weights(c, i, Role::kWeight, Role::kBias);
  a.x = c.at(x);
  a.x_stride = c.stride(x);
  a.x_scale_offset = artifact::q8_scale_offset(c.stride(x));
  a.x_per_pair = x.type.rows == Rows::kPair;
  a.y = c.floats(y);
  a.y_stride = c.stride(y);
  if (!c.stream) return kernels::expert_linear(a, *c.pool, c.cpu);
  each_streamed_part(c, i, i.in[1], [&](std::span<const int32_t> experts) {
    a.only = experts;
    kernels::expert_linear(a, *c.pool, c.cpu);
  });
}

void run_expert_combine(Context& c, const Instr& i) {
  const Operand &x = i.in[0], &y = i.out[0];
  kernels::ExpertCombineArgs a;
  a.tokens = c.tokens;
  a.cols = y.type.cols;
  a.route = route_rows(c, i.in[1]);
  a.y = c.floats(x);
  a.y_stride = c.stride(x);
  if (i.residual >= 0) {
    a.residual = c.floats(i.in[size_t(i.residual)]);
    a.residual_stride = c.stride(i.in[size_t(i.residual)]);
  }
  a.out = c.floats(y);
  a.out_stride = c.stride(y);
  kernels::expert_combine(a, *c.pool, c.cpu);
}

void run_grouped_experts(Context& c, const Instr& i) {
  const Operand &x = i.in[0], &y = i.out[0];
  kernels::GroupedExpertsArgs a;
  a.tokens = c.tokens;
  a.route = route_rows(c, i.in[1]);
  a.gate = expert_weights(c, i, Role::kGate, Role::kGateBias);
  a.up = expert_weights(c, i, Role::kUp, Role::kUpBias);
  a.down = expert_weights(c, i, Role::kDown, Role::kDownBias);
  const GroupedExpertsParams& p = std::get<GroupedExpertsParams>(i.params);
  a.act = p.activation();
  a.h_scale = stored_scale(c, i, p.saturate);
  a.x = c.at(x);
  a.x_stride = c.stride(x);
  a.x_scale_offset = artifact::q8_scale_offset(c.stride(x));
  if (i.residual >= 0) {
    a.residual = c.floats(i.in[size_t(i.residual)]);
    a.residual_stride = c.stride(i.in[size_t(i.residual)]);
  }
  a.out = c.floats(y);
  a.out_stride = c.stride(y);
  a.scratch = c.scratch(i);
  const auto products = [&](std::span<const int32_t> experts) { kernels::grouped_products(a, experts, *c.pool, c.cpu); };
  if (c.stream) {
    each_streamed_part(c, i, i.in[1], products);
  } else if (i.groups.empty()) {
    products({});
  } else {
    for (const std::vector<int32_t>& group : i.groups) products(group);
  }
  kernels::grouped_sum(a, *c.pool, c.cpu);
}

int64_t grouped_scratch_bytes(const Context& c, const Instr& i) {
  const Weight& down = *c.find(i, Role::kDown);
  return kernels::grouped_scratch_bytes_per_token(i.in[1].type.cols, down.info->n, down.info->k, gemm_format(down));
}

}  // namespace mi::exec
