#include "compiler/fallbacks.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/util.h"

namespace mi::compiler {
namespace {

bool is_quantized_model(const ir::Graph& g) {
  auto has = [](const ir::Block& b) { return std::any_of(b.weights.begin(), b.weights.end(), ir::is_quantized); };
  return has(g.prologue) || has(g.epilogue) || std::any_of(g.blocks.begin(), g.blocks.end(), has);
}

bool float_by_design(ir::Mark m) {
  return m == ir::Mark::kRouter || m == ir::Mark::kHead || m == ir::Mark::kIndex || m == ir::Mark::kSharedGate;
}

// The share of an expert stack that one token reads.
double share_read(const ir::Block& b, const ir::Node& n) {
  if (n.op != Op::kExpertLinear && n.op != Op::kGroupedExperts) return 1;
  for (const ir::Node& r : b.nodes)
    if (const auto* p = std::get_if<RouteParams>(&r.params); p && !r.out.empty() && r.out[0] == n.in[1])
      return double(p->k) / double(p->experts);
  return 1;
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
        f.where = b.layers.empty() ? d.name : fmt::format("{}: {}", layers_text(b.layers), d.name);
        const double numbers = double(shape_count(d.shape).value_or(0)) * share_read(b, n);
        f.what = fmt::format("{} product in float instead of int8; a token reads {} of weights instead of {}, and {} of floats as input{}",
                             op_name(n.op), human_bytes(numbers * double(dtype_bytes(d.dtype))), human_bytes(numbers),
                             human_bytes(4.0 * double(d.shape.back())), b.layers.size() > 1 ? " in each of these layers" : "");
        f.why = fmt::format("the matrix {} is stored as {} while the model is quantized", shape_text(d.shape),
                            dtype_name(d.dtype));
        f.fix = "quantize it: take it out of sensitive_layers, or choose a checkpoint that has it in int8";
        out->push_back(std::move(f));
      }
    }
}

}  // namespace

std::string layers_text(const std::vector<int32_t>& layers) {
  const std::string word = layers.size() == 1 ? "layer " : "layers ";
  std::string out;
  for (size_t i = 0; i < layers.size();) {
    size_t j = i;
    while (j + 1 < layers.size() && layers[j + 1] == layers[j] + 1) ++j;
    out += fmt::format("{}{}", out.empty() ? "" : ", ", layers[i]);
    if (j > i) out += fmt::format("-{}", layers[j]);
    i = j + 1;
  }
  return word + out;
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
