#include "quant/cost_table.h"

#include "kernels/gemm/measure.h"

namespace mi::quant {
namespace {

kernels::GemmFormat gemm_format(LayerFormat f, DType float_type) {
  if (f == LayerFormat::kFloat) return float_type == DType::kF32 ? kernels::GemmFormat::kF32 : kernels::GemmFormat::kBF16;
  return f == LayerFormat::kInt8 ? kernels::GemmFormat::kI8 : kernels::GemmFormat::kI4;
}

}  // namespace

CostTable CostTable::measure(const std::vector<Unit>& units, const std::vector<LayerFormat>& formats, DType float_type,
                             hw::ThreadPool& pool) {
  CostTable t;
  kernels::GemmMeasure measure(pool);
  for (const Unit& u : units)
    for (const UnitMatrix& m : u.matrices)
      for (LayerFormat f : formats)
        if (const auto key = std::tuple(m.n, m.k, f); !t.seconds_.count(key))
          t.seconds_[key] = measure.seconds(kernels::select_gemm(gemm_format(f, float_type)), 1, m.n, m.k, group_of(f));
  return t;
}

double CostTable::seconds(const Unit& u, LayerFormat f) const {
  double sum = 0;
  for (const UnitMatrix& m : u.matrices) sum += m.active * seconds_.at({m.n, m.k, f});
  return sum;
}

}  // namespace mi::quant
