#include "quant/units.h"

#include <algorithm>

#include "quant/capture.h"
#include "quant/choice.h"
#include "tensor/int4.h"

namespace mi::quant {
namespace {

std::string common_prefix(const std::string& module) { return module.substr(0, module.rfind('.')); }

}  // namespace

std::vector<Unit> units_of(const ir::Graph& g) {
  std::vector<Unit> units;
  for (int32_t layer = 0; layer < g.info.layers; ++layer) {
    const ir::Block& b = g.block_of(layer);
    double share = 1;
    for (const ir::Node& n : b.nodes)
      if (n.op == Op::kRoute) {
        const auto& p = std::get<RouteParams>(n.params);
        share = double(p.k) / double(p.experts);
      }
    const size_t first = units.size();
    for (const MatrixUse& use : matrix_uses(b)) {
      const ir::WeightDecl& d = b.weights[size_t(use.weight)];
      if (ir::is_quantized(d) || !is_rounded_by_default(d)) continue;
      const std::string module = ir::full_name(d.name, layer);
      const std::string name = common_prefix(module.substr(0, module.rfind('.')));
      auto it = std::find_if(units.begin() + ptrdiff_t(first), units.end(), [&](const Unit& u) { return u.name == name; });
      if (it == units.end()) it = units.insert(units.end(), {layer, name, d.mark, {}, {}});
      const int64_t k = d.shape.back(), n = d.shape[d.shape.size() - 2];
      const double experts = d.shape.size() == 3 ? double(d.shape[0]) : 1;
      it->matrices.push_back({n, k, experts, use.experts ? experts * share : 1});
      if (std::find(it->values.begin(), it->values.end(), use.value) == it->values.end())
        it->values.push_back(use.value);
    }
  }
  return units;
}

int64_t group_of(LayerFormat f) {
  return f == LayerFormat::kInt4G32 ? 32 : f == LayerFormat::kInt4G64 ? 64 : f == LayerFormat::kInt4G128 ? 128 : 0;
}

int64_t unit_bytes(const Unit& u, LayerFormat f, DType float_type) {
  double bytes = 0;
  for (const UnitMatrix& m : u.matrices) {
    const int64_t group = group_of(f);
    bytes += m.count * double(f == LayerFormat::kFloat  ? m.n * m.k * int64_t(dtype_bytes(float_type))
                              : f == LayerFormat::kInt8 ? m.n * m.k + m.n * 4
                                                        : m.n * int4_row_bytes(m.k) + m.n * int4_groups(m.k, group) * 2);
  }
  return int64_t(bytes);
}

double bits_per_weight(const Unit& u, LayerFormat f, DType float_type) {
  double weights = 0;
  for (const UnitMatrix& m : u.matrices) weights += m.count * double(m.n * m.k);
  return weights > 0 ? 8 * double(unit_bytes(u, f, float_type)) / weights : 0;
}

}  // namespace mi::quant
