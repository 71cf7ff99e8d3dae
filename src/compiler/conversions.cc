#include "compiler/conversions.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "compiler/fallbacks.h"

namespace mi::compiler {
namespace {

bool quantized(const ir::Block& b, const ir::Node& n, Role role) {
  for (const ir::WeightUse& u : n.weights)
    if (u.role == role) return ir::is_quantized(b.weights[size_t(u.weights[0])]);
  return false;
}

class Finder {
 public:
  Finder(const ir::Block& b, std::vector<Conversion>* out) : b_(b), out_(out), maker_(b.values.size(), nullptr) {
    for (const ir::Node& n : b.nodes)
      for (ir::ValueId v : n.out) maker_[size_t(v)] = &n;
  }

  void run() {
    for (const ir::Node& n : b_.nodes) {
      switch (n.op) {
        case Op::kQuantize: quantize(n); break;
        case Op::kRmsNorm:
          if (q8(n.out.back()))
            add(n.out.back(), true, "rms_norm", n.out.size() > 1
                                                    ? "its mean and weights are float, and something reads the float result too: " + readers(n.out[0])
                                                    : "its mean and weights are float");
          break;
        case Op::kActivation:
          if (q8(n.out[0])) add(n.out[0], true, "activation", "the function is float; no row of floats is stored");
          break;
        case Op::kLinear:
        case Op::kExpertLinear:
          if (quantized(b_, n, Role::kWeight))
            add(n.out[0], false, fmt::format("the epilogue of {}", op_name(n.op)),
                n.op == Op::kLinear && n.in.size() > 1 ? "the residual is added in float" : why_float(n.out[0]));
          break;
        case Op::kGroupedExperts:
          if (quantized(b_, n, Role::kGate)) add(n.out[0], false, "grouped_experts (gate, up)", "the activation is a float function");
          if (quantized(b_, n, Role::kDown)) {
            add(n.out[0], true, "grouped_experts (activation)", "the function is float; its rows stay inside the kernel");
            add(n.out[0], false, "grouped_experts (down)", "experts are weighted and added in float");
          }
          break;
        default: break;
      }
    }
  }

 private:
  bool q8(ir::ValueId v) const { return b_.values[size_t(v)].type.elem == Elem::kQ8; }

  // Slices are views: who reads them reads v.
  void each_reader(ir::ValueId v, const std::function<void(const ir::Node&)>& f) const {
    for (const ir::Node& n : b_.nodes)
      if (std::find(n.in.begin(), n.in.end(), v) != n.in.end()) {
        if (n.op == Op::kSlice)
          each_reader(n.out[0], f);
        else
          f(n);
      }
  }
  std::string readers(ir::ValueId v) const {
    std::vector<std::string> ops;
    each_reader(v, [&](const ir::Node& n) {
      std::string op(op_name(n.op));
      for (const ir::WeightUse& u : n.weights)
        for (int32_t w : u.weights)
          if (const ir::Mark m = b_.weights[size_t(w)].mark; m == ir::Mark::kRouter || m == ir::Mark::kSharedGate || m == ir::Mark::kIndex)
            op = fmt::format("{} of the {}", op, ir::mark_name(m));
      if (std::find(ops.begin(), ops.end(), op) == ops.end()) ops.push_back(op);
    });
    return fmt::format("{}", fmt::join(ops, ", "));
  }
  std::string why_float(ir::ValueId v) const {
    bool attention = false, activation = false, add = false;
    each_reader(v, [&](const ir::Node& n) {
      attention |= n.op == Op::kRope || n.op == Op::kKvAppend || n.op == Op::kAttention || n.op == Op::kRmsNorm || n.op == Op::kClamp ||
                   n.op == Op::kIndexAppend || n.op == Op::kIndexSelect;
      activation |= n.op == Op::kActivation;
      add |= n.op == Op::kAdd || n.op == Op::kScale || n.op == Op::kSigmoidMul || n.op == Op::kExpertCombine;
    });
    if (attention) return "norms, rope and attention compute in float";
    if (activation) return "the activation is a float function";
    if (add) return "it is added in float";
    return b_.layers.empty() ? "logits are float" : "it is read as float by " + readers(v);
  }
  void quantize(const ir::Node& n) {
    const ir::Node* from = maker_[size_t(n.in[0])];
    std::string why;
    if (!n.weights.empty())
      why = "its scale is stored, and the kernel before it computes scales per row";
    else if (from && from->op == Op::kAttention)
      why = "the scale needs the whole row, whose heads different threads compute";
    else if (from && (from->op == Op::kRmsNorm || from->op == Op::kActivation))
      why = from->pinned || n.pinned ? "fusion.ignore leaves it alone" : fmt::format("{} writes floats here: its pass is off, or something else reads them", op_name(from->op));
    else
      why = fmt::format("no kernel of {} writes int8", from ? op_name(from->op) : "the layer before");
    add(n.out[0], true, "quantize, a kernel call of its own", why);
    out_->back().own_call = true;
    out_->back().buffer_bytes = 4 * b_.values[size_t(n.in[0])].type.cols;
  }
  void add(ir::ValueId v, bool to_int8, std::string by, std::string why) {
    const std::string& name = b_.values[size_t(v)].name;
    Conversion c;
    c.where = b_.layers.empty() ? name : fmt::format("{}: {}", layers_text(b_.layers), name);
    c.to_int8 = to_int8;
    c.by = std::move(by);
    c.why = std::move(why);
    c.times = std::max<int64_t>(1, int64_t(b_.layers.size()));
    out_->push_back(std::move(c));
  }

  const ir::Block& b_;
  std::vector<Conversion>* out_;
  std::vector<const ir::Node*> maker_;
};

}  // namespace

std::vector<Conversion> find_conversions(const ir::Graph& g) {
  std::vector<Conversion> all;
  Finder(g.prologue, &all).run();
  for (const ir::Block& b : g.blocks) Finder(b, &all).run();
  Finder(g.epilogue, &all).run();
  return all;
}

std::string conversions_line(const std::vector<Conversion>& all) {
  int64_t floats = 0, ints = 0, own = 0, own_bytes = 0;
  std::vector<std::pair<std::string, int64_t>> inside;
  for (const Conversion& c : all) {
    (c.to_int8 ? ints : floats) += c.times;
    if (!c.to_int8) continue;
    if (c.own_call) {
      own += c.times;
      own_bytes = std::max(own_bytes, c.buffer_bytes);
      continue;
    }
    const std::string op = c.by.substr(0, c.by.find(' '));
    const auto it = std::find_if(inside.begin(), inside.end(), [&](const auto& p) { return p.first == op; });
    if (it == inside.end())
      inside.emplace_back(op, c.times);
    else
      it->second += c.times;
  }
  std::string s = fmt::format("{} int8 -> float, all in epilogues of products; {} float -> int8", floats, ints);
  for (const auto& [op, n] : inside) s += fmt::format(", {} in {}", n, op);
  if (own > 0) s += fmt::format(", {} kernel calls of their own", own);
  return s;
}

}  // namespace mi::compiler
