#include "compiler/graph_view.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/html.h"
#include "compiler/fallbacks.h"

namespace mi::compiler {
namespace {

using html::escape;

// What an op computes in, by the weights of its matrix products; "" for one without.
std::string precision_of(const ir::Block& b, const ir::Node& n) {
  for (const ir::WeightUse& u : n.weights)
    for (const int32_t w : u.weights) {
      const ir::WeightDecl& d = b.weights[size_t(w)];
      if (d.shape.size() >= 2) return ir::format_text(d);
    }
  return "";
}

const char* color_of(const std::string& precision) {
  if (precision.starts_with("w8a8")) return "#b7dcf5";
  if (precision.starts_with("w4a8")) return "#c9e8b5";
  if (precision == "bf16" || precision == "f16") return "#f7e3a5";
  if (!precision.empty()) return "#f5c4b3";
  return "#eeeeee";
}

// Stacked matrices, a residual taken along, a norm or activation that quantizes, keys rotated on their way, a chain of experts in one.
std::string fused_of(const ir::Block& b, const ir::Node& n) {
  if (n.op == Op::kGroupedExperts) return "experts in one kernel";
  std::string s;
  const auto add = [&](const std::string& what) { s += (s.empty() ? "" : ", ") + what; };
  for (const ir::WeightUse& u : n.weights)
    if (u.role == Role::kWeight && u.weights.size() > 1) add(fmt::format("{} matrices in one", u.weights.size()));
  if (n.op == Op::kLinear && n.in.size() > 1) add("with residual");
  if (const auto* p = std::get_if<KvAppendParams>(&n.params); p && p->rotary_dim > 0) add("with rope");
  if (n.op == Op::kRmsNorm || n.op == Op::kActivation)
    for (const ir::ValueId v : n.out)
      if (b.values[size_t(v)].type.elem == Elem::kQ8) add("with quantize");
  return s;
}

std::string type_text(const ValueType& t) {
  switch (t.elem) {
    case Elem::kRoute: return fmt::format("route of {}", t.cols);
    case Elem::kState: return "cache";
    case Elem::kQ8: return fmt::format("int8 x {}", t.cols);
    case Elem::kI32: return fmt::format("int32 x {}", t.cols);
    case Elem::kF32: break;
  }
  return fmt::format("float x {}", t.cols);
}

std::string weights_text(const ir::Block& b, const ir::Node& n) {
  std::string s;
  for (const ir::WeightUse& u : n.weights)
    for (const int32_t w : u.weights) {
      const ir::WeightDecl& d = b.weights[size_t(w)];
      s += fmt::format("{}{} {} [{}]", s.empty() ? "" : "; ", d.name, ir::format_text(d), fmt::join(d.shape, " x "));
    }
  return s;
}

std::string title_of(const ir::Block& b) {
  return b.layers.empty() ? b.name : fmt::format("{}: {}", b.name, layers_text(b.layers));
}

template <class F>
void each_block(const ir::Graph& g, F&& f) {
  f(g.prologue);
  for (const ir::Block& b : g.blocks) f(b);
  f(g.epilogue);
}

std::string dot_string(const std::string& s) {
  std::string out = "\"";
  for (const char c : s) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

}  // namespace

std::string graph_dot(const ir::Graph& g) {
  std::string s = fmt::format("digraph {} {{\n  rankdir=TB;\n  node [shape=box, style=\"rounded,filled\", fontname=\"sans-serif\", fontsize=10];\n", dot_string(g.info.name));
  int at = 0;
  each_block(g, [&](const ir::Block& b) {
    const std::string id = fmt::format("b{}", at++);
    s += fmt::format("  subgraph cluster_{} {{\n    label={};\n", id, dot_string(title_of(b)));
    std::vector<std::string> maker(b.values.size());
    for (const ir::ValueId v : b.inputs) {
      maker[size_t(v)] = fmt::format("{}_in{}", id, v);
      s += fmt::format("    {} [label={}, shape=ellipse, fillcolor=\"#ffffff\"];\n", maker[size_t(v)], dot_string(b.values[size_t(v)].name));
    }
    for (size_t i = 0; i < b.nodes.size(); ++i) {
      const ir::Node& n = b.nodes[i];
      const std::string precision = precision_of(b, n), fused = fused_of(b, n);
      std::string label = std::string(op_name(n.op));
      if (!n.out.empty()) label += "\n" + b.values[size_t(n.out[0])].name + ": " + type_text(b.values[size_t(n.out[0])].type);
      if (!precision.empty()) label += "\n" + precision;
      if (!fused.empty()) label += "\n" + fused;
      std::string escaped = dot_string(label);
      for (size_t p; (p = escaped.find('\n')) != std::string::npos;) escaped.replace(p, 1, "\\n");
      s += fmt::format("    {}_n{} [label={}, fillcolor=\"{}\"{}];\n", id, i, escaped, color_of(precision), fused.empty() ? "" : ", penwidth=2");
      for (const ir::ValueId v : n.in) s += fmt::format("    {} -> {}_n{};\n", maker[size_t(v)], id, i);
      for (const ir::ValueId v : n.out) maker[size_t(v)] = fmt::format("{}_n{}", id, i);
    }
    s += "  }\n";
  });
  return s + "}\n";
}

std::string graph_html(const ir::Graph& g) {
  std::string s = "<p>";
  for (const char* p : {"w8a8", "w4a8", "bf16", "f32", ""})
    s += fmt::format("<span style=\"background:{};padding:.1rem .5rem;margin-right:.5rem\">{}</span>", color_of(p), *p ? p : "no matrix");
  s += "</p>\n";
  bool first_layer = true;
  each_block(g, [&](const ir::Block& b) {
    const bool open = !b.layers.empty() && first_layer;
    if (open) first_layer = false;
    s += fmt::format("<details{}><summary>{}, {} ops</summary>\n<table>\n", open ? " open" : "", escape(title_of(b)), b.nodes.size());
    s += html::row({"result", "op", "reads", "type", "weights", "fused"}, "th");
    for (const ir::Node& n : b.nodes) {
      std::string reads, result, type;
      for (const ir::ValueId v : n.in) reads += (reads.empty() ? "" : ", ") + b.values[size_t(v)].name;
      for (const ir::ValueId v : n.out) {
        result += (result.empty() ? "" : ", ") + b.values[size_t(v)].name;
        type += (type.empty() ? "" : ", ") + type_text(b.values[size_t(v)].type);
      }
      s += fmt::format("<tr style=\"background:{}\"><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>\n",
                       color_of(precision_of(b, n)), escape(result), op_name(n.op), escape(reads), escape(type),
                       escape(weights_text(b, n)), escape(fused_of(b, n)));
    }
    s += "</table></details>\n";
  });
  return s;
}

}  // namespace mi::compiler
