#include "ir/text.h"

#include <algorithm>

#include "tensor/op_fields.h"

namespace mi::ir {

constexpr ValueType kStateType{Rows::kToken, 0, Elem::kState};

std::string type_text(const ValueType& t) {
  if (t == kStateType) return "state";
  return fmt::format("{}[{}, {}]", elem_name(t.elem),
                     t.rows == Rows::kToken  ? "T"
                     : t.rows == Rows::kPair ? "P"
                                             : "L",
                     t.cols);
}

namespace {

std::string in_quotes(std::string_view s) {
  std::string r = "\"";
  for (unsigned char c : s) {
    if (c == '"' || c == '\\')
      r += {'\\', char(c)};
    else if (c < 0x20 || c == 0x7f)
      r += fmt::format("\\x{:02x}", c);
    else
      r += char(c);
  }
  return r + '"';
}

// "0..2, 5, 7..9"
std::string ranges_text(const std::vector<int32_t>& layers) {
  std::string r;
  for (size_t i = 0; i < layers.size();) {
    size_t j = i;
    while (j + 1 < layers.size() && layers[j + 1] == layers[j] + 1) ++j;
    if (!r.empty()) r += ", ";
    r += i == j ? fmt::format("{}", layers[i]) : fmt::format("{}..{}", layers[i], layers[j]);
    i = j + 1;
  }
  return r;
}

// Prints any block, also an illegal one (dumps while debugging a pass).
class BlockPrinter {
 public:
  explicit BlockPrinter(const Block& b) : b_(b) {}

  std::string run() {
    size_t width = 0;
    for (const WeightDecl& d : b_.weights) width = std::max(width, d.name.size());
    std::string s;
    for (ValueId v : b_.inputs) s += fmt::format("  input {} : {}\n", value(v), type(v));
    for (const WeightDecl& d : b_.weights) {
      s += fmt::format("  weight {:<{}} : {} {}{}{}\n", d.name, std::min<size_t>(width, 48), format_text(d),
                       shape_text(d.shape), d.mark == Mark::kNone ? "" : " ",
                       d.mark == Mark::kNone ? "" : mark_name(d.mark));
    }
    if (!s.empty() && !b_.nodes.empty()) s += '\n';
    width = 0;
    for (const Node& n : b_.nodes) width = std::max(width, names(n.out).size());
    for (const Node& n : b_.nodes)
      s += fmt::format("  {:<{}} = {}\n", names(n.out), std::min<size_t>(width, 16), node(n));
    if (!b_.outputs.empty()) s += fmt::format("  output {}\n", names(b_.outputs));
    return s;
  }

 private:
  bool known(ValueId v) const { return v >= 0 && size_t(v) < b_.values.size(); }
  std::string value(ValueId v) const { return known(v) ? b_.values[size_t(v)].name : fmt::format("?{}", v); }
  std::string type(ValueId v) const { return known(v) ? type_text(b_.values[size_t(v)].type) : "?"; }
  std::string weight(int32_t w) const {
    return w >= 0 && size_t(w) < b_.weights.size() ? b_.weights[size_t(w)].name : fmt::format("?{}", w);
  }
  std::string names(const std::vector<ValueId>& vs) const {
    std::string s;
    for (ValueId v : vs) s += (s.empty() ? "" : ", ") + value(v);
    return s;
  }
  std::string node(const Node& n) const {
    std::string s(op_name(n.op)), sep = " ";
    for (ValueId v : n.in) s += std::exchange(sep, ", ") + value(v);
    for (const WeightUse& u : n.weights) {
      std::string list;
      for (int32_t w : u.weights) list += (list.empty() ? "" : ", ") + weight(w);
      s += fmt::format("{}{}={}{}{}", std::exchange(sep, ", "), role_name(u.role), u.weights.size() == 1 ? "" : "[",
                       list, u.weights.size() == 1 ? "" : "]");
    }
    if (const std::string p = params_text(n.params); !p.empty()) s += " {" + p + "}";
    sep = " : ";
    for (ValueId v : n.out) s += std::exchange(sep, ", ") + type(v);
    return s;
  }

  const Block& b_;
};

std::string int_list(const std::vector<int64_t>& v) { return fmt::format("[{}]", fmt::join(v, ", ")); }

}  // namespace

std::string print(const Graph& g) {
  const ModelInfo& m = g.info;
  std::string s = "mir 1\n\n";
  s += fmt::format("model {} {{\n", in_quotes(m.name));
  s += fmt::format("  family={} model_type={}\n", in_quotes(m.family), in_quotes(m.model_type));
  s += fmt::format("  vocab={} hidden={} layers={} max_positions={}\n", m.vocab, m.hidden, m.layers, m.max_positions);
  s += fmt::format("  eos_ids={} bos_id={} pad_id={}\n}}\n", int_list(m.eos_ids), m.bos_id, m.pad_id);
  s += fmt::format("\nprologue {{\n{}}}\n", BlockPrinter(g.prologue).run());
  for (const Block& b : g.blocks)
    s += fmt::format("\nblock {} layers = {} {{\n{}}}\n", b.name, ranges_text(b.layers), BlockPrinter(b).run());
  s += fmt::format("\nepilogue {{\n{}}}\n", BlockPrinter(g.epilogue).run());
  return s;
}

}  // namespace mi::ir
