#pragma once
// Which experts the tokens of each step really chose, counted by a tap on the program's routes.

#include <cstdint>
#include <map>
#include <vector>

#include "exec/engine.h"

namespace mi::tools {

class ExpertCounter {
 public:
  struct Route {
    int32_t layer = -1;
    int64_t experts = 0, k = 0;
    std::vector<std::vector<int32_t>> steps;  // per step: tokens that chose each expert
    int64_t distinct(size_t step) const;      // experts that at least one token chose
  };

  // The manifest must outlive the counter.
  explicit ExpertCounter(const artifact::Manifest& m);
  ExpertCounter(const ExpertCounter&) = delete;

  const exec::Tap* tap() const { return &tap_; }
  void begin_step();
  const std::vector<Route>& routes() const { return routes_; }
  // The route that an instruction's expert weights are chosen by; null: it has none.
  const Route* route_of(const artifact::Instr& i) const;

 private:
  exec::Tap tap_;
  std::vector<Route> routes_;
  std::map<int32_t, size_t> by_buffer_;  // of the route's result
};

// The sum over the steps.
struct ExpertLoad {
  int32_t layer = -1;
  int64_t experts = 0, k = 0;
  std::vector<int64_t> tokens;   // that chose each expert
  double distinct_per_step = 0;  // mean number of different experts
  double even_distinct = 0;      // expected if every expert were equally likely
  double skew = 0;               // the busiest expert's tokens over the mean
};
// step_tokens: tokens of each counted step.
ExpertLoad expert_load(const ExpertCounter::Route& r, const std::vector<int64_t>& step_tokens);

}  // namespace mi::tools
