#include "tools/inspect/model_diff.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "artifact/layout.h"
#include "compiler/fallbacks.h"
#include "quant/rewrite.h"

namespace mi::tools {
namespace {

// Facts with the same label are one: "block" of several kinds, "pass" of several passes.
std::map<std::string, std::string> by_label(const Card& c, std::vector<std::string>* order) {
  std::map<std::string, std::string> m;
  for (const auto& [label, value] : c.facts) {
    auto& v = m[label];
    if (v.empty() && std::find(order->begin(), order->end(), label) == order->end()) order->push_back(label);
    v += (v.empty() ? "" : "; ") + value;
  }
  return m;
}

std::map<std::string, int64_t> op_counts(const ir::Graph& g) {
  std::map<std::string, int64_t> m;
  const auto add = [&](const ir::Block& b, int64_t times) {
    for (const ir::Node& n : b.nodes) m[std::string(op_name(n.op))] += times;
  };
  add(g.prologue, 1);
  for (const ir::Block& b : g.blocks) add(b, int64_t(b.layers.size()));
  add(g.epilogue, 1);
  return m;
}

std::map<std::string, std::string> declarations(const ir::Graph& g) {
  std::map<std::string, std::string> m;
  const auto add = [&](const ir::Block& b, int32_t layer) {
    for (const ir::WeightDecl& d : b.weights)
      m[ir::full_name(d.name, layer)] = fmt::format("{} [{}]", ir::format_text(d), fmt::join(d.shape, " x "));
  };
  add(g.prologue, -1);
  for (const ir::Block& b : g.blocks)
    for (const int32_t layer : b.layers) add(b, layer);
  add(g.epilogue, -1);
  return m;
}

// By name, in the order of experts.
using Parts = std::vector<std::span<const std::byte>>;
std::map<std::string, Parts> stored(const Subject& s) {
  std::map<std::string, Parts> m;
  if (s.mir)
    for (const auto& d : ir::declared_tensors(s.graph)) {
      const TensorView v = s.mir->weight(d.name);
      m[d.name] = {{v.data, size_t(v.count()) * dtype_bytes(v.dtype)}};
    }
  if (s.engine)
    for (const artifact::WeightTensor& w : s.engine->manifest.weights)
      for (int64_t e = 0; e < w.experts; ++e)
        m[w.name].push_back(s.engine->bytes.subspan(size_t(w.offset + artifact::expert_slot(w, e) * w.expert_stride), size_t(w.expert_stride)));
  return m;
}

template <class Map, class Text>
void differences(const Map& a, const Map& b, const Text& text, std::vector<ModelDiff::Line>* out, int64_t* same = nullptr) {
  std::set<std::string> names;
  for (const auto& [name, unused] : a) names.insert(name);
  for (const auto& [name, unused] : b) names.insert(name);
  for (const std::string& name : names) {
    const auto x = a.find(name), y = b.find(name);
    const std::string left = x == a.end() ? "" : text(x->second), right = y == b.end() ? "" : text(y->second);
    if (left != right)
      out->push_back({name, left, right});
    else if (same)
      ++*same;
  }
}

}  // namespace

ModelDiff diff_models(const Subject& a, const Subject& b, int64_t available) {
  ModelDiff c;
  std::vector<std::string> order;
  const auto left = by_label(make_card(a, available), &order), right = by_label(make_card(b, available), &order);
  for (const std::string& label : order) {
    const auto x = left.find(label), y = right.find(label);
    const std::string p = x == left.end() ? "" : x->second, q = y == right.end() ? "" : y->second;
    if (p != q) c.facts.push_back({label, p, q});
  }
  differences(op_counts(a.graph), op_counts(b.graph), [](int64_t n) { return fmt::format("{}", n); }, &c.ops);
  differences(declarations(a.graph), declarations(b.graph), [](const std::string& s) { return s; }, &c.weights, &c.same_weights);
  c.bytes_compared = (a.mir && b.mir) || (a.engine && b.engine);
  if (c.bytes_compared) {
    const auto x = stored(a), y = stored(b);
    const auto same_size = [](const auto& p, const auto& q) { return p.size() == q.size(); };
    const auto same_bytes = [](const auto& p, const auto& q) { return std::memcmp(p.data(), q.data(), p.size()) == 0; };
    for (const auto& [name, parts] : x) {
      const auto other = y.find(name);
      if (other == y.end() || !std::equal(parts.begin(), parts.end(), other->second.begin(), other->second.end(), same_size)) continue;  // told by the declarations
      if (std::equal(parts.begin(), parts.end(), other->second.begin(), same_bytes))
        ++c.equal_bytes;
      else
        c.other_bytes.push_back(name);
    }
  }
  return c;
}

std::string model_diff_text(const ModelDiff& c) {
  constexpr size_t kMost = 20;
  // "layers.3.attn.q.weight" and its like in other layers are one line when they change in the same way.
  std::vector<ModelDiff::Line> weights;
  std::map<std::string, std::pair<size_t, std::vector<int32_t>>> places;
  for (const auto& l : c.weights) {
    const int32_t layer = quant::layer_of(l.what);
    const std::string local = layer < 0 ? l.what : l.what.substr(l.what.find('.', l.what.find('.') + 1) + 1);
    const auto [at, fresh] = places.try_emplace(local + '\n' + l.a + '\n' + l.b, weights.size(), std::vector<int32_t>());
    if (fresh) weights.push_back({local, l.a, l.b});
    if (layer < 0) continue;
    at->second.second.push_back(layer);
  }
  for (auto& [key, place] : places) {
    std::sort(place.second.begin(), place.second.end());
    if (!place.second.empty()) weights[place.first].what += "  (" + compiler::layers_text(place.second) + ")";
  }
  const auto side = [](const std::string& s) { return s.empty() ? std::string("-") : s; };
  std::string s;
  const auto list = [&](const std::vector<ModelDiff::Line>& lines, const char* title, size_t most) {
    if (lines.empty()) return;
    s += fmt::format("{}:\n", title);
    for (size_t i = 0; i < std::min(lines.size(), most); ++i)
      s += fmt::format("  {}\n    A  {}\n    B  {}\n", lines[i].what, side(lines[i].a), side(lines[i].b));
    if (lines.size() > most) s += fmt::format("  and {} more (--json has all)\n", lines.size() - most);
  };
  list(c.facts, "facts", c.facts.size());
  if (!c.ops.empty()) {
    s += "ops, summed over layers:\n";
    for (const auto& l : c.ops) s += fmt::format("  {:<20} {:>6} -> {:>6}\n", l.what, l.a.empty() ? "0" : l.a, l.b.empty() ? "0" : l.b);
  }
  list(weights, "weights that are declared differently", kMost);
  s += fmt::format("weights       {} declared equally, {} differently\n", c.same_weights, c.weights.size());
  if (!c.bytes_compared) {
    s += "numbers       not compared: only two MIRs or two engines store them in the same way\n";
  } else {
    s += fmt::format("numbers       {} weights equal to the byte, {} not\n", c.equal_bytes, c.other_bytes.size());
    for (size_t i = 0; i < std::min(c.other_bytes.size(), kMost); ++i) s += "  " + c.other_bytes[i] + "\n";
    if (c.other_bytes.size() > kMost) s += fmt::format("  and {} more (--json has all)\n", c.other_bytes.size() - kMost);
  }
  return s + (c.same() ? "the same\n" : "");
}

Json model_diff_json(const ModelDiff& c) {
  const auto lines = [](const std::vector<ModelDiff::Line>& v) {
    Json a = Json::array();
    for (const auto& l : v) a.push_back({{"what", l.what}, {"a", l.a}, {"b", l.b}});
    return a;
  };
  return {{"same", c.same()},
          {"facts", lines(c.facts)},
          {"ops", lines(c.ops)},
          {"weights", lines(c.weights)},
          {"weights_declared_equally", c.same_weights},
          {"bytes_compared", c.bytes_compared},
          {"equal_bytes", c.equal_bytes},
          {"other_bytes", c.other_bytes}};
}

}  // namespace mi::tools
