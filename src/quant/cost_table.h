#pragma once
// How long this machine takes for the products of one token, by shape and format: measured with the kernels that an
// engine would use, weights coming from memory as in a decode step.

#include <map>
#include <tuple>

#include "base/result.h"
#include "hw/thread_pool.h"
#include "quant/units.h"

namespace mi::quant {

class CostTable {
 public:
  // Every shape of the units in every format; about 30 ms each.
  static CostTable measure(const std::vector<Unit>& units, const std::vector<LayerFormat>& formats, DType float_type,
                           hw::ThreadPool& pool);
  // Of the unit's active matrices, for one token.
  double seconds(const Unit& u, LayerFormat f) const;

 private:
  std::map<std::tuple<int64_t, int64_t, LayerFormat>, double> seconds_;  // of one matrix [n, k]
};

}  // namespace mi::quant
