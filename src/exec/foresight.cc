#include <algorithm>
#include <numeric>

#include "exec/context.h"
#include "kernels/route/route.h"

namespace mi::exec {
namespace {

using artifact::Instr;

constexpr int64_t kRows = 16;  // of a step that are looked at; in larger ones nearly every expert is chosen

// The instruction before `end` that wrote the buffer; `end`: none.
size_t writer(const artifact::Manifest& m, int32_t buffer, size_t end) {
  for (size_t n = end; n-- > 0;)
    for (const artifact::Operand& o : m.program[n].out)
      if (o.buffer == buffer) return n;
  return end;
}

}  // namespace

std::vector<Foresight> find_foresight(const Context& c) {
  const artifact::Manifest& m = c.manifest();
  std::vector<Foresight> all;  // next_*: first of the router itself
  for (size_t n = 0; n < m.program.size(); ++n) {
    if (c.stream_group[n] < 0) continue;
    const size_t route = writer(m, m.program[n].in[1].buffer, n);
    if (route == n || m.program[route].op != Op::kRoute) continue;
    const size_t router = writer(m, m.program[route].in[0].buffer, route);
    if (router == route || m.program[router].op != Op::kLinear || m.program[router].residual >= 0) continue;
    if (all.empty() || all.back().next_route != route) all.push_back({0, router, route, {}});
    all.back().next_groups.push_back(size_t(c.stream_group[n]));
  }
  std::vector<Foresight> next;
  for (size_t i = 1; i < all.size(); ++i) {
    const auto &x = m.program[all[i - 1].next_router].in[0].type, &y = m.program[all[i].next_router].in[0].type;
    if (x.elem != y.elem || x.cols != y.cols) continue;
    next.push_back(all[i]);
    next.back().router = all[i - 1].next_router;
  }
  return next;
}

void foresee(Context& c, size_t router) {
  const auto f = std::find_if(c.foresight.begin(), c.foresight.end(), [&](const Foresight& x) { return x.router == router; });
  if (f == c.foresight.end() || !c.stream->ahead_pays()) return;
  const artifact::Manifest& m = c.manifest();
  const Instr &route = m.program[f->next_route], &next = m.program[f->next_router];
  const auto& p = std::get<RouteParams>(route.params);
  const int64_t rows = std::min(c.tokens, kRows), cols = artifact::round_up(p.experts, 16), route_bytes = artifact::round_up(8 * p.k, 64);

  std::vector<float> logits(size_t(rows * cols));
  std::vector<int32_t> chosen(size_t(rows * route_bytes / 4));
  const kernels::GemmArgs here = linear_args(c, m.program[router]);
  kernels::GemmArgs a = linear_args(c, next);
  a.m = rows;
  a.x = here.x;
  a.x_stride = here.x_stride;
  a.x_scale_offset = here.x_scale_offset;
  a.y = logits.data();
  a.y_stride = cols * 4;
  kernels::gemm_run(*c.gemm[size_t(gemm_format(*c.find(next, Role::kWeight)))], a, *c.pool);
  kernels::route_run(p, {rows, logits.data(), cols * 4, c.vector(route, Role::kSelectBias), chosen.data(), route_bytes}, *c.pool, c.cpu);

  std::vector<int64_t> votes(size_t(p.experts));
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = 0; j < p.k; ++j) ++votes[size_t(chosen[size_t(r * route_bytes / 4 + j)])];
  c.foreseen.resize(size_t(p.experts));
  std::iota(c.foreseen.begin(), c.foreseen.end(), 0);
  std::stable_sort(c.foreseen.begin(), c.foreseen.end(), [&](int32_t x, int32_t y) { return votes[size_t(x)] > votes[size_t(y)]; });
  if (c.tokens <= kRows) std::erase_if(c.foreseen, [&](int32_t e) { return votes[size_t(e)] == 0; });
  c.foreseen_groups = f->next_groups;
}

}  // namespace mi::exec
