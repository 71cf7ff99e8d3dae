#include "runtime/expert_load.h"

#include <algorithm>

#include "base/check.h"

namespace mi::runtime {
namespace {

std::vector<ExpertLoad::Route> routes_of(const artifact::Manifest& m) {
  std::vector<ExpertLoad::Route> routes;
  size_t first = 0;
  for (const artifact::Instr& i : m.program) {
    if (i.op != Op::kRoute) continue;
    const int64_t experts = std::get<RouteParams>(i.params).experts;
    routes.push_back({i.layer, experts, first});
    first += size_t(experts);
  }
  return routes;
}

}  // namespace

ExpertLoad::ExpertLoad(const artifact::Manifest& m)
    : routes_(routes_of(m)), counts_(routes_.empty() ? 0 : routes_.back().first + size_t(routes_.back().experts)) {}

void ExpertLoad::add(const exec::TapEvent& e) {
  const auto r =
      std::find_if(routes_.begin(), routes_.end(), [&](const Route& x) { return x.layer == e.instr->layer; });
  MI_CHECK(r != routes_.end(), "layer {} chooses experts, and the program does not say so", e.instr->layer);
  for (int64_t j = 0; j < e.rows * e.cols; ++j) {
    // One writer: no need for the price of an atomic addition.
    std::atomic<uint64_t>& n = counts_[r->first + size_t(e.ids[j])];
    n.store(n.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
}

}  // namespace mi::runtime
