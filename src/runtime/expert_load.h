#pragma once
// How often the router chose each expert, by layer: numbers for /metrics. The step loop adds, any thread reads.

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "exec/engine.h"

namespace mi::runtime {

class ExpertLoad {
 public:
  explicit ExpertLoad(const artifact::Manifest& m);
  ExpertLoad(const ExpertLoad&) = delete;

  struct Route {
    int64_t layer = 0, experts = 0;
    size_t first = 0;  // of its counts
  };
  const std::vector<Route>& routes() const { return routes_; }  // in the order of the program
  uint64_t tokens(const Route& r, int64_t expert) const {
    return counts_[r.first + size_t(expert)].load(std::memory_order_relaxed);
  }

  // For the tap of the one who runs the steps: wants() an instruction's output, then add() what it sees.
  static bool wants(const artifact::Instr& i, bool input) { return !input && i.op == Op::kRoute; }
  void add(const exec::TapEvent& e);

 private:
  std::vector<Route> routes_;
  std::vector<std::atomic<uint64_t>> counts_;
};

}  // namespace mi::runtime
