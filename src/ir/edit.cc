#include "ir/edit.h"

#include <algorithm>
#include <map>

#include "base/check.h"
#include "ir/verify.h"

namespace mi::ir {

ValueId new_value(Block& b, const std::string& name_hint, ValueType t) {
  b.values.push_back({fresh_name(b, name_hint), t});
  return ValueId(b.values.size()) - 1;
}

void replace_uses(Block& b, ValueId from, ValueId to) {
  for (Node& n : b.nodes) std::replace(n.in.begin(), n.in.end(), from, to);
  std::replace(b.outputs.begin(), b.outputs.end(), from, to);
}

void tidy(Block& b) {
  std::erase_if(b.nodes, [](const Node& n) { return n.out.empty(); });

  std::vector<ValueId> id(b.values.size(), -1);
  std::vector<Value> values;
  auto define = [&](ValueId& v) {
    id[size_t(v)] = ValueId(values.size());
    values.push_back(std::move(b.values[size_t(v)]));
    v = id[size_t(v)];
  };
  auto resolve = [&](ValueId& v) {
    MI_CHECK(id[size_t(v)] >= 0, "block {}: value {} is read before its definition", b.name, v);
    v = id[size_t(v)];
  };
  for (ValueId& v : b.inputs) define(v);
  for (Node& n : b.nodes) {
    for (ValueId& v : n.in) resolve(v);
    for (ValueId& v : n.out) define(v);
  }
  for (ValueId& v : b.outputs) resolve(v);
  b.values = std::move(values);

  std::vector<int32_t> index(b.weights.size(), -1);
  for (const Node& n : b.nodes)
    for (const WeightUse& u : n.weights)
      for (int32_t w : u.weights) index[size_t(w)] = 0;
  std::vector<WeightDecl> weights;
  for (size_t w = 0; w < index.size(); ++w) {
    if (index[w] < 0) continue;
    index[w] = int32_t(weights.size());
    weights.push_back(std::move(b.weights[w]));
  }
  for (Node& n : b.nodes)
    for (WeightUse& u : n.weights)
      for (int32_t& w : u.weights) w = index[size_t(w)];
  b.weights = std::move(weights);
}

void insert_node(Block& b, size_t at, Node n) {
  MI_CHECK(at <= b.nodes.size(), "{} of {}", at, b.nodes.size());
  b.nodes.insert(b.nodes.begin() + ptrdiff_t(at), std::move(n));
}

void set_format(WeightDecl& d, QuantFormat f) {
  MI_CHECK(f.format != WeightFormat::kFloat, "{}", d.name);
  d.format = f.format;
  d.dtype = f.format == WeightFormat::kW8A8 ? DType::kI8 : DType::kU8;
  d.group = f.format == WeightFormat::kW8A8 ? 0 : f.group;
}

void set_float(WeightDecl& d, DType t) {
  d.format = WeightFormat::kFloat;
  d.dtype = t;
  d.group = 0;
}

void split_layers(Graph& g, const std::function<std::string(const Block&, int32_t)>& key) {
  auto taken = [&](const std::vector<Block>& done, const std::string& name) {
    auto same = [&](const Block& b) { return b.name == name; };
    return std::any_of(done.begin(), done.end(), same) || std::any_of(g.blocks.begin(), g.blocks.end(), same);
  };
  std::vector<Block> out;
  for (const Block& b : g.blocks) {
    std::vector<std::pair<std::string, std::vector<int32_t>>> groups;  // in order of their first layer
    for (int32_t l : b.layers) {
      const std::string k = key(b, l);
      auto it = std::find_if(groups.begin(), groups.end(), [&](const auto& p) { return p.first == k; });
      if (it == groups.end()) it = groups.insert(groups.end(), {k, {}});
      it->second.push_back(l);
    }
    for (size_t i = 0; i < groups.size(); ++i) {
      Block part = b;
      part.layers = groups[i].second;
      for (size_t n = 2; i > 0 && taken(out, part.name); ++n) part.name = fmt::format("{}.{}", b.name, n);
      out.push_back(std::move(part));
    }
  }
  g.blocks = std::move(out);
}

void merge_equal_blocks(Graph& g) {
  std::vector<Block> out;
  for (Block& b : g.blocks) {
    auto same = [&](const Block& o) {
      return o.weights == b.weights && o.values == b.values && o.inputs == b.inputs && o.outputs == b.outputs &&
             o.nodes == b.nodes;
    };
    const auto it = std::find_if(out.begin(), out.end(), same);
    if (it == out.end()) {
      out.push_back(std::move(b));
      continue;
    }
    it->layers.insert(it->layers.end(), b.layers.begin(), b.layers.end());
    std::sort(it->layers.begin(), it->layers.end());
  }
  g.blocks = std::move(out);
}

namespace {

// Whether a matrix of this role is multiplied with the node's input 0.
bool multiplies_input(Op op, Role r) {
  if (op == Op::kLinear || op == Op::kExpertLinear) return r == Role::kWeight;
  return op == Op::kGroupedExperts && (r == Role::kGate || r == Role::kUp);
}

// Gives every quantized matrix its int8 input: one quantize per distinct value, before the first reader.
void rewire_to_q8(Block& b) {
  std::map<ValueId, ValueId> quantized;
  for (size_t i = 0; i < b.nodes.size(); ++i) {
    const Node& n = b.nodes[i];
    if (n.op == Op::kQuantize && n.weights.empty()) quantized.try_emplace(n.in[0], n.out[0]);
    bool int8 = false;
    for (const WeightUse& u : n.weights)
      for (int32_t w : u.weights)
        int8 = int8 || (multiplies_input(n.op, u.role) && is_quantized(b.weights[size_t(w)]));
    if (!int8) continue;
    const ValueId x = n.in[0];
    ValueType type = b.values[size_t(x)].type;
    if (type.elem != Elem::kF32) continue;
    auto it = quantized.find(x);
    if (it == quantized.end()) {
      type.elem = Elem::kQ8;
      const ValueId q = new_value(b, b.values[size_t(x)].name + "_q", type);
      insert_node(b, i++, Node{Op::kQuantize, {x}, {q}, {}, QuantizeParams{}});
      it = quantized.emplace(x, q).first;
    }
    b.nodes[i].in[0] = it->second;
  }
  tidy(b);
}

}  // namespace

Status to_quantized(Graph& g, const std::function<QuantFormat(int32_t, const WeightDecl&)>& choose) {
  split_layers(g, [&](const Block& b, int32_t layer) {
    std::string k;
    for (const WeightDecl& d : b.weights) {
      const QuantFormat f = is_quantized(d) ? QuantFormat{} : choose(layer, d);
      k += fmt::format("{}.{} ", int(f.format), f.group);
    }
    return k;
  });
  auto convert = [&](Block& b, int32_t layer) {
    for (WeightDecl& d : b.weights) {
      if (is_quantized(d)) continue;
      if (const QuantFormat f = choose(layer, d); f.format != WeightFormat::kFloat) set_format(d, f);
    }
    rewire_to_q8(b);
  };
  convert(g.prologue, -1);
  for (Block& b : g.blocks) convert(b, b.layers.at(0));
  convert(g.epilogue, -1);
  return verify(g);
}

Status to_w8a8(Graph& g, const std::function<bool(int32_t, const WeightDecl&)>& chosen) {
  return to_quantized(g, [&](int32_t layer, const WeightDecl& d) {
    return QuantFormat{chosen(layer, d) ? WeightFormat::kW8A8 : WeightFormat::kFloat, 0};
  });
}

}  // namespace mi::ir
