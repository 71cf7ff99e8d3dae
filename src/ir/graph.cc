#include "ir/graph.h"

#include <algorithm>

#include "base/check.h"
#include "tensor/int4.h"

namespace mi::ir {
namespace {
constexpr std::array<std::string_view, 12> kMarkNames = {"none",          "embedding",   "head",   "norm",
                                                         "attention",     "index",       "router", "expert",
                                                         "shared_expert", "shared_gate", "dense",  "constant"};
static_assert(size_t(Mark::kConstant) + 1 == kMarkNames.size());
}  // namespace

std::string_view mark_name(Mark m) { return kMarkNames[size_t(m)]; }

std::optional<Mark> mark_from_name(std::string_view name) {
  for (size_t i = 0; i < kMarkNames.size(); ++i)
    if (kMarkNames[i] == name) return Mark(i);
  return std::nullopt;
}

std::string format_text(const WeightDecl& d) {
  if (d.format == WeightFormat::kW8A8) return "w8a8";
  if (d.format == WeightFormat::kW4A8) return fmt::format("w4a8_g{}", d.group);
  std::string name(dtype_name(d.dtype));
  for (char& c : name)
    if (c >= 'A' && c <= 'Z') c = char(c - 'A' + 'a');
  return name;
}

Shape stored_shape(const WeightDecl& d) {
  Shape s = d.shape;
  if (d.format == WeightFormat::kW4A8) s.back() = int4_row_bytes(s.back());
  return s;
}

Shape scale_shape(const WeightDecl& d) {
  Shape s = d.shape;
  if (d.format == WeightFormat::kW4A8)
    s.back() = int4_groups(s.back(), d.group);
  else
    s.pop_back();
  return s;
}

const Block& Graph::block_of(int32_t layer) const {
  for (const Block& b : blocks)
    if (std::binary_search(b.layers.begin(), b.layers.end(), layer)) return b;
  MI_CHECK(false, "no block holds layer {} of {}", layer, info.layers);
  std::abort();
}

std::string full_name(const std::string& local, int32_t layer) {
  return layer < 0 ? local : fmt::format("layers.{}.{}", layer, local);
}

std::string fresh_name(const Block& b, const std::string& hint) {
  auto taken = [&](const std::string& name) {
    return std::any_of(b.values.begin(), b.values.end(), [&](const Value& v) { return v.name == name; });
  };
  std::string name = hint;
  for (int i = 2; taken(name); ++i) name = fmt::format("{}_{}", hint, i);
  return name;
}

ValueId BlockBuilder::input(std::string name, ValueType t) {
  MI_CHECK(b_->nodes.empty(), "inputs come before nodes");
  b_->values.push_back({fresh_name(*b_, name), t});
  b_->inputs.push_back(ValueId(b_->values.size()) - 1);
  return b_->inputs.back();
}

int32_t BlockBuilder::weight(WeightDecl d) {
  const auto found = std::find(b_->weights.begin(), b_->weights.end(), d);
  if (found != b_->weights.end()) return int32_t(found - b_->weights.begin());
  b_->weights.push_back(std::move(d));
  return int32_t(b_->weights.size()) - 1;
}

ValueId BlockBuilder::node(Op op, std::vector<ValueId> in, std::vector<WeightUse> weights, OpParams params,
                           std::string result_name) {
  MI_CHECK(params.index() == size_t(op), "the parameters are those of op {}", params.index());
  std::stable_sort(weights.begin(), weights.end(),
                   [](const WeightUse& a, const WeightUse& b) { return a.role < b.role; });
  Node n{op, std::move(in), {}, std::move(weights), std::move(params)};
  const auto types = infer(*b_, n);
  const ValueType t = types.index() == 0 ? std::get<0>(types)[0] : ValueType{};
  b_->values.push_back({fresh_name(*b_, result_name), t});
  n.out = {ValueId(b_->values.size()) - 1};
  b_->nodes.push_back(std::move(n));
  return b_->nodes.back().out[0];
}

void BlockBuilder::output(ValueId v) { b_->outputs.push_back(v); }

}  // namespace mi::ir
