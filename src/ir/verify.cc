#include "ir/verify.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <unordered_set>

#include "tensor/int4.h"
#include "tensor/op.h"

namespace mi::ir {
namespace {

constexpr int64_t kMaxLayers = 10000;

bool name_is_plain(std::string_view s, std::string_view extra) {
  return !s.empty() && s.size() <= 256 && std::all_of(s.begin(), s.end(), [&](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           extra.find(c) != extra.npos;
  });
}

class BlockVerifier {
 public:
  BlockVerifier(const Block& b, bool layer) : b_(b), layer_(layer) {}

  Status run() {
    MI_TRY_VOID(weights());
    MI_TRY_VOID(values());
    for (size_t i = 0; i < b_.nodes.size(); ++i) MI_TRY_VOID(node(i));
    if (defined_ != b_.values.size()) return bad("value '{}' is made by no node", b_.values[defined_].name);
    for (ValueId v : b_.outputs)
      if (v < 0 || size_t(v) >= b_.values.size()) return bad("its output is value {} of {}", v, b_.values.size());
    for (size_t w = 0; w < b_.weights.size(); ++w)
      if (!weight_used_[w]) return bad("weight {} is read by no node: drop its declaration", b_.weights[w].name);
    return states();
  }

 private:
  template <typename... Args>
  Error bad(fmt::format_string<Args...> f, Args&&... args) const {
    return bad_input("block '{}': {}", b_.name, fmt::format(f, std::forward<Args>(args)...));
  }
  // "block 'moe': node 3 (linear 'q'): ..."
  template <typename... Args>
  Error bad_node(size_t i, fmt::format_string<Args...> f, Args&&... args) const {
    const Node& n = b_.nodes[i];
    const bool named = !n.out.empty() && n.out[0] >= 0 && size_t(n.out[0]) < b_.values.size();
    return bad("node {} ({}{}): {}", i, op_name(n.op), named ? " '" + b_.values[size_t(n.out[0])].name + "'" : "",
               fmt::format(f, std::forward<Args>(args)...));
  }

  Status weights() {
    std::unordered_set<std::string_view> names;
    for (const WeightDecl& d : b_.weights) {
      if (!name_is_plain(d.name, ".-")) return bad("weight '{}': a name is letters, digits, '_', '.' and '-'", d.name);
      if (!names.insert(d.name).second) return bad("weight {} is declared twice", d.name);
      if (!layer_ && d.name.starts_with("layers."))
        return bad("weight {}: names that begin with 'layers.' belong to layers", d.name);
      if (d.shape.empty() || d.shape.size() > 3)
        return bad("weight {}: shape {} has to have one to three dimensions", d.name, shape_text(d.shape));
      for (int64_t n : d.shape)
        if (n < 1) return bad("weight {}: shape {} has a dimension below 1", d.name, shape_text(d.shape));
      const auto count = shape_count(d.shape);
      if (!count || *count > (int64_t(1) << 50))
        return bad("weight {}: shape {} is too large", d.name, shape_text(d.shape));
      if (d.format == WeightFormat::kW8A8) {
        if (d.dtype != DType::kI8) return bad("weight {}: w8a8 is stored as I8, not {}", d.name, dtype_name(d.dtype));
      } else if (d.format == WeightFormat::kW4A8) {
        if (d.dtype != DType::kU8) return bad("weight {}: w4a8 is stored as U8, not {}", d.name, dtype_name(d.dtype));
        if (!int4_group_ok(d.group)) return bad("weight {}: a group is 32, 64 or 128, not {}", d.name, d.group);
      } else if (d.dtype != DType::kF32 && d.dtype != DType::kBF16 && d.dtype != DType::kF16) {
        return bad("weight {}: a float weight is F32, BF16 or F16, not {}", d.name, dtype_name(d.dtype));
      }
      if (is_quantized(d) && d.shape.size() < 2)
        return bad("weight {}: {} is for matrices, not for shape {}", d.name, format_text(d), shape_text(d.shape));
      if (d.format != WeightFormat::kW4A8 && d.group != 0) return bad("weight {}: only w4a8 has groups", d.name);
    }
    for (const WeightDecl& d : b_.weights)
      if (is_quantized(d) && names.count(d.name + "_scale"))
        return bad("weight {}_scale: the name is taken by the scales of {}", d.name, d.name);
    weight_used_.assign(b_.weights.size(), false);
    return {};
  }

  Status values() {
    std::unordered_set<std::string_view> names;
    for (const Value& v : b_.values) {
      if (!name_is_plain(v.name, "")) return bad("value '{}': a name is letters, digits and '_'", v.name);
      if (!names.insert(v.name).second) return bad("value '{}' is defined twice", v.name);
    }
    for (ValueId v : b_.inputs) {
      if (size_t(v) != defined_ || defined_ >= b_.values.size()) return bad("its inputs have to be its first values");
      ++defined_;
    }
    return {};
  }

  Status node(size_t i) {
    const Node& n = b_.nodes[i];
    for (ValueId v : n.in) {
      if (v < 0 || size_t(v) >= b_.values.size()) return bad_node(i, "an input is value {} of {}", v, b_.values.size());
      if (size_t(v) >= defined_)
        return bad_node(i, "input '{}' is used before its definition", b_.values[size_t(v)].name);
    }
    for (ValueId v : n.out) {
      if (v < 0 || size_t(v) != defined_ || defined_ >= b_.values.size())
        return bad_node(i, "result {} has to be the next value, {} of {}: values are numbered in order of definition",
                        v, defined_, b_.values.size());
      ++defined_;
    }
    std::string_view not_finite;
    std::visit(
        [&](const auto& p) {
          p.visit(p, [&](const char* name, const auto& field) {
            if constexpr (std::is_same_v<std::decay_t<decltype(field)>, float>)
              if (!std::isfinite(field)) not_finite = name;
          });
        },
        n.params);
    if (!not_finite.empty()) return bad_node(i, "{} has to be a finite number", not_finite);
    const auto inferred = infer(b_, n);
    if (const auto* e = std::get_if<InferError>(&inferred)) return bad_node(i, "{}", e->message);
    const auto& types = std::get<0>(inferred);
    if (types.size() != n.out.size()) return bad_node(i, "it has {} results, here are {}", types.size(), n.out.size());
    for (size_t r = 0; r < types.size(); ++r)
      if (b_.values[size_t(n.out[r])].type != types[r])
        return bad_node(i, "result '{}' has another type than the op gives", b_.values[size_t(n.out[r])].name);
    for (const WeightUse& u : n.weights)
      for (int32_t w : u.weights) weight_used_[size_t(w)] = true;
    return {};
  }

  // A layer appends once to each of its caches, and what reads a cache agrees with what writes it.
  Status states() {
    std::unordered_map<ValueId, size_t> writer;  // of a state or a selection
    int64_t kv = 0, index = 0;
    for (size_t i = 0; i < b_.nodes.size(); ++i) {
      const Node& n = b_.nodes[i];
      if (n.op == Op::kKvAppend || n.op == Op::kIndexAppend) {
        if (!layer_) return bad_node(i, "only layers have a cache");
        if (++(n.op == Op::kKvAppend ? kv : index) > 1)
          return bad_node(i, "a layer has one such cache, and it is appended to already");
        writer[n.out[0]] = i;
      } else if (n.op == Op::kAttention) {
        const auto& a = std::get<AttentionParams>(n.params);
        const auto w = writer.find(n.in[1]);
        const auto* p = w == writer.end() ? nullptr : std::get_if<KvAppendParams>(&b_.nodes[w->second].params);
        if (n.in.size() > 2) {
          const auto s = writer.find(n.in[2]);
          const auto* sel = s == writer.end() ? nullptr : std::get_if<IndexSelectParams>(&b_.nodes[s->second].params);
          if (!sel || sel->heads != a.kv_heads || sel->block != a.select_block)
            return bad_node(
                i, "input '{}' has to be the result of an index_select with heads = kv_heads and block = select_block",
                b_.values[size_t(n.in[2])].name);
        }
        if (!p || p->kv_heads != a.kv_heads || p->k_dim != a.k_dim || p->v_dim != a.v_dim)
          return bad_node(i, "input '{}' has to be the state of a kv_append with the same kv_heads, k_dim and v_dim",
                          b_.values[size_t(n.in[1])].name);
      } else if (n.op == Op::kIndexSelect) {
        const auto w = writer.find(n.in[1]);
        const auto* p = w == writer.end() ? nullptr : std::get_if<IndexAppendParams>(&b_.nodes[w->second].params);
        if (!p || p->dim != std::get<IndexSelectParams>(n.params).dim)
          return bad_node(i, "input '{}' has to be the state of an index_append with the same dim",
                          b_.values[size_t(n.in[1])].name);
        writer[n.out[0]] = i;
      }
    }
    return {};
  }

  const Block& b_;
  const bool layer_;
  size_t defined_ = 0;  // values 0 .. defined_-1 are defined so far
  std::vector<bool> weight_used_;
};

Status check_layers(const Graph& g) {
  if (g.info.layers < 0 || g.info.layers > kMaxLayers)
    return bad_input("model: layers is {}, expected 0 to {}", g.info.layers, kMaxLayers);
  std::vector<const Block*> owner(size_t(g.info.layers), nullptr);
  std::unordered_set<std::string_view> names{"prologue", "epilogue"};
  for (const Block& b : g.blocks) {
    if (!name_is_plain(b.name, ".-"))
      return bad_input("block '{}': a name is letters, digits, '_', '.' and '-'", b.name);
    if (!names.insert(b.name).second) return bad_input("block '{}' is there twice", b.name);
    if (b.layers.empty()) return bad_input("block '{}': it stands for no layer", b.name);
    for (size_t i = 0; i < b.layers.size(); ++i) {
      const int32_t l = b.layers[i];
      if (l < 0 || l >= g.info.layers)
        return bad_input("block '{}': layer {} is not one of the model's {} layers", b.name, l, g.info.layers);
      if (i > 0 && b.layers[i - 1] >= l)
        return bad_input("block '{}': its layers have to ascend, {} follows {}", b.name, l, b.layers[i - 1]);
      if (owner[size_t(l)])
        return bad_input("block '{}': layer {} belongs to block '{}' already", b.name, l, owner[size_t(l)]->name);
      owner[size_t(l)] = &b;
    }
  }
  for (size_t l = 0; l < owner.size(); ++l)
    if (!owner[l]) return bad_input("model: no block holds layer {}", l);
  return {};
}

// The block's face: how many inputs and outputs, and their type.
Status check_face(const Block& b, size_t inputs, Rows out_rows, int64_t out_cols, int64_t hidden) {
  if (b.inputs.size() != inputs)
    return bad_input("block '{}': it has {} inputs, expected {}", b.name, b.inputs.size(), inputs);
  if (b.outputs.size() != 1) return bad_input("block '{}': it has {} outputs, expected 1", b.name, b.outputs.size());
  for (ValueId v : b.inputs)
    if (b.values[size_t(v)].type != ValueType{Rows::kToken, hidden, Elem::kF32})
      return bad_input("block '{}': input '{}' has to be f32[T, {}], the residual stream", b.name,
                       b.values[size_t(v)].name, hidden);
  const Value& y = b.values[size_t(b.outputs[0])];
  if (y.type != ValueType{out_rows, out_cols, Elem::kF32})
    return bad_input("block '{}': output '{}' has to be f32[{}, {}]", b.name, y.name,
                     out_rows == Rows::kToken ? "T" : "L", out_cols);
  if (!b.inputs.empty() && b.outputs[0] == b.inputs[0]) return bad_input("block '{}': its output is its input", b.name);
  return {};
}

}  // namespace

Status verify(const Graph& g) {
  if (g.info.vocab < 1 || g.info.hidden < 1)
    return bad_input("model: vocab is {} and hidden is {}, expected sizes above 0", g.info.vocab, g.info.hidden);
  MI_TRY_VOID(check_layers(g));
  if (g.prologue.name != "prologue" || g.epilogue.name != "epilogue" || !g.prologue.layers.empty() ||
      !g.epilogue.layers.empty())
    return bad_input("model: prologue and epilogue have these names and no layers");
  MI_TRY_VOID(BlockVerifier(g.prologue, false).run());
  MI_TRY_VOID(check_face(g.prologue, 0, Rows::kToken, g.info.hidden, g.info.hidden));
  for (const Block& b : g.blocks) {
    MI_TRY_VOID(BlockVerifier(b, true).run());
    MI_TRY_VOID(check_face(b, 1, Rows::kToken, g.info.hidden, g.info.hidden));
  }
  MI_TRY_VOID(BlockVerifier(g.epilogue, false).run());
  MI_TRY_VOID(check_face(g.epilogue, 1, Rows::kLogit, g.info.vocab, g.info.hidden));
  // A name in both (tied embeddings) is one tensor.
  for (const WeightDecl& e : g.epilogue.weights)
    for (const WeightDecl& p : g.prologue.weights) {
      if (e.name == p.name && !(e == p))
        return bad_input("block 'epilogue': weight {} is declared differently in the prologue", e.name);
      const bool scales = (is_quantized(p) && e.name == p.name + "_scale") ||
                          (is_quantized(e) && p.name == e.name + "_scale");
      if (scales) return bad_input("block 'epilogue': weight {}: the names clash with those of the scales", e.name);
    }
  return {};
}

}  // namespace mi::ir
