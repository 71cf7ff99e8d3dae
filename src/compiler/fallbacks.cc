#include "compiler/fallbacks.h"

#include <fmt/format.h>

#include <algorithm>

namespace mi::compiler {
namespace {

bool is_quantized_model(const ir::Graph& g) {
  auto has = [](const ir::Block& b) { return std::any_of(b.weights.begin(), b.weights.end(), ir::is_quantized); };
  return has(g.prologue) || has(g.epilogue) || std::any_of(g.blocks.begin(), g.blocks.end(), has);
}

bool float_by_design(ir::Mark m) {
  return m == ir::Mark::kRouter || m == ir::Mark::kHead || m == ir::Mark::kIndex || m == ir::Mark::kSharedGate;
}

bool multiplies(Op op, Role role) {
  if (op == Op::kLinear || op == Op::kExpertLinear) return role == Role::kWeight;
  return op == Op::kGroupedExperts && (role == Role::kGate || role == Role::kUp || role == Role::kDown);
}

void find_in(const ir::Block& b, std::vector<artifact::Fallback>* out) {
  std::vector<bool> seen(b.weights.size());
  for (const ir::Node& n : b.nodes)
    for (const ir::WeightUse& u : n.weights) {
      if (!multiplies(n.op, u.role)) continue;
      for (int32_t w : u.weights) {
        const ir::WeightDecl& d = b.weights[size_t(w)];
        if (ir::is_quantized(d) || float_by_design(d.mark) || seen[size_t(w)]) continue;
        seen[size_t(w)] = true;
        artifact::Fallback f;
        f.where = b.layers.empty() ? d.name : fmt::format("layers {}: {}", layers_text(b.layers), d.name);
        f.what = fmt::format("{} product in float instead of int8", op_name(n.op));
        f.why = fmt::format("the matrix {} is stored as {} while the model is quantized", shape_text(d.shape),
                            dtype_name(d.dtype));
        f.fix = "quantize it: take it out of sensitive_layers, or choose a checkpoint that has it in int8";
        out->push_back(std::move(f));
      }
    }
}

}  // namespace

std::string layers_text(const std::vector<int32_t>& layers) {
  std::string out;
  for (size_t i = 0; i < layers.size();) {
    size_t j = i;
    while (j + 1 < layers.size() && layers[j + 1] == layers[j] + 1) ++j;
    out += fmt::format("{}{}", out.empty() ? "" : ", ", layers[i]);
    if (j > i) out += fmt::format("-{}", layers[j]);
    i = j + 1;
  }
  return out;
}

std::vector<artifact::Fallback> find_fallbacks(const ir::Graph& g) {
  std::vector<artifact::Fallback> out;
  if (!is_quantized_model(g)) return out;
  find_in(g.prologue, &out);
  for (const ir::Block& b : g.blocks) find_in(b, &out);
  find_in(g.epilogue, &out);
  return out;
}

}  // namespace mi::compiler
