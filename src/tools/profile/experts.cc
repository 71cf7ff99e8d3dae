#include "tools/profile/experts.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "tools/cost.h"

namespace mi::tools {

int64_t ExpertCounter::Route::distinct(size_t step) const {
  return std::count_if(steps[step].begin(), steps[step].end(), [](int32_t n) { return n > 0; });
}

ExpertCounter::ExpertCounter(const artifact::Manifest& m) {
  for (const artifact::Instr& i : m.program) {
    if (i.op != Op::kRoute) continue;
    by_buffer_[i.out[0].buffer] = routes_.size();
    routes_.push_back({i.layer, std::get<RouteParams>(i.params).experts, i.out[0].type.cols, {}});
  }
  tap_.want = [](const artifact::Instr& i, bool input) { return !input && i.op == Op::kRoute; };
  tap_.see = [this](const exec::TapEvent& e) {
    std::vector<int32_t>& counts = routes_[by_buffer_.at(e.operand->buffer)].steps.back();
    for (int64_t j = 0; j < e.rows * e.cols; ++j) ++counts[size_t(e.ids[j])];
  };
}

void ExpertCounter::begin_step() {
  for (Route& r : routes_) r.steps.emplace_back(size_t(r.experts), 0);
}

const ExpertCounter::Route* ExpertCounter::route_of(const artifact::Instr& i) const {
  if (i.op != Op::kExpertLinear && i.op != Op::kGroupedExperts) return nullptr;
  return &routes_[by_buffer_.at(i.in[1].buffer)];
}

ExpertLoad expert_load(const ExpertCounter::Route& r, const std::vector<int64_t>& step_tokens) {
  MI_CHECK_EQ(r.steps.size(), step_tokens.size());
  ExpertLoad l{r.layer, r.experts, r.k, std::vector<int64_t>(size_t(r.experts), 0), 0, 0, 0};
  for (size_t s = 0; s < r.steps.size(); ++s) {
    for (size_t e = 0; e < l.tokens.size(); ++e) l.tokens[e] += r.steps[s][e];
    l.distinct_per_step += double(r.distinct(s)) / double(r.steps.size());
    l.even_distinct += expected_experts(r.experts, r.k, double(step_tokens[s])) / double(r.steps.size());
  }
  const int64_t sum = std::accumulate(l.tokens.begin(), l.tokens.end(), int64_t{0});
  if (sum > 0) l.skew = double(*std::max_element(l.tokens.begin(), l.tokens.end())) * double(r.experts) / double(sum);
  return l;
}

}  // namespace mi::tools
