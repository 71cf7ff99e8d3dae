#include "compiler/lower.h"

#include <algorithm>
#include <optional>

#include "artifact/layout.h"
#include "kernels/gemm/pack.h"
#include "kernels/moe/grouped.h"

namespace mi::compiler {
namespace {

using artifact::Buffer;
using artifact::Instr;
using artifact::Operand;
using artifact::Packing;
using artifact::WeightTensor;

static_assert(artifact::kPackN == kernels::kNTile && artifact::kPackK == kernels::kKPad);

bool is_matrix(Op op, Role role) {
  return (role == Role::kWeight && (op == Op::kLinear || op == Op::kExpertLinear)) || role == Role::kGate ||
         role == Role::kUp || role == Role::kDown;
}

// Index into a node's inputs of the value that is added at the end, -1 if there is none.
int32_t residual_of(const ir::Node& n) {
  const size_t first = n.op == Op::kLinear                                         ? 1
                       : n.op == Op::kExpertCombine || n.op == Op::kGroupedExperts ? 2
                                                                                   : SIZE_MAX;
  return n.in.size() > first ? int32_t(first) : -1;
}

DType common_float(const ir::Block& b, const ir::WeightUse& u) {
  const bool all_bf16 = std::all_of(u.weights.begin(), u.weights.end(),
                                    [&](int32_t w) { return b.weights[size_t(w)].dtype == DType::kBF16; });
  return all_bf16 ? DType::kBF16 : DType::kF32;
}

Packing choose_packing(const ir::Block& b, const ir::WeightUse& u, FloatPrecision p) {
  const ir::WeightDecl& first = b.weights[size_t(u.weights[0])];
  if (first.format == ir::WeightFormat::kW8A8) return Packing::kPackedI8;
  if (first.format == ir::WeightFormat::kW4A8) return Packing::kPackedI4;
  const bool router = std::any_of(u.weights.begin(), u.weights.end(),
                                  [&](int32_t w) { return b.weights[size_t(w)].mark == ir::Mark::kRouter; });
  if (router || p == FloatPrecision::kFp32) return Packing::kPackedF32;
  if (p == FloatPrecision::kBf16 || common_float(b, u) == DType::kBF16) return Packing::kPackedBF16;
  return Packing::kPackedF32;
}

class Lowering {
 public:
  Lowering(const ir::Graph& g, FloatPrecision p) : g_(g), precision_(p) {}

  Result<Program> run() {
    out_.caches.resize(size_t(g_.info.layers));
    MI_TRY(Operand x, block(g_.prologue, -1, std::nullopt));
    for (int32_t l = 0; l < int32_t(g_.info.layers); ++l) {
      const ir::Block& b = g_.block_of(l);
      if (auto s = caches(b, l); !s.ok()) return s.error().with_context(fmt::format("block '{}', layer {}", b.name, l));
      MI_TRY(x, block(b, l, x));
    }
    MI_TRY(Operand logits, block(g_.epilogue, -1, x));
    out_.buffers[size_t(logits.buffer)].last_instr = int32_t(out_.instrs.size()) - 1;
    if (out_.instrs.empty() || out_.instrs.back().out.empty() || out_.instrs.back().out[0].buffer != logits.buffer)
      return bad_input("block 'epilogue': the last node has to be the one that gives the logits");
    return std::move(out_);
  }

 private:
  // Appends the block's instructions; returns the operand of its output.
  Result<Operand> block(const ir::Block& b, int32_t layer, std::optional<Operand> x) {
    std::vector<Operand> values(b.values.size());
    if (x) {
      MI_CHECK_EQ(b.inputs.size(), size_t(1));
      values[size_t(b.inputs[0])] = *x;
    }
    const size_t begin = out_.instrs.size();
    for (const ir::Node& n : b.nodes) {
      if (n.op == Op::kSlice) {
        const auto& p = std::get<SliceParams>(n.params);
        Operand o = values[size_t(n.in[0])];
        o.col += p.start;
        o.type.cols = p.len;
        values[size_t(n.out[0])] = o;
      } else {
        instruction(b, n, layer, &values);
      }
    }
    MI_CHECK_EQ(b.outputs.size(), size_t(1));
    const Operand y = values[size_t(b.outputs[0])];
    const auto maker = std::find_if(out_.instrs.begin() + ptrdiff_t(begin), out_.instrs.end(),
                                    [&](const Instr& i) { return !i.out.empty() && i.out[0].buffer == y.buffer; });
    if (maker == out_.instrs.end() || maker->out[0].type != y.type)
      return bad_input("block '{}': its output '{}' is not a value that one of its nodes makes", b.name,
                       b.values[size_t(b.outputs[0])].name);
    if (&b != &g_.epilogue) maker->layer_output = true;
    return y;
  }

  void instruction(const ir::Block& b, const ir::Node& n, int32_t layer, std::vector<Operand>* values) {
    const int32_t index = int32_t(out_.instrs.size());
    Instr in;
    in.op = n.op;
    in.layer = layer;
    in.params = n.params;
    in.residual = residual_of(n);
    in.name = b.values[size_t(n.out[0])].name;
    int64_t pair_rows = 1;  // rows per token of the pair values of this node
    for (ir::ValueId v : n.in) {
      const Operand& o = (*values)[size_t(v)];
      in.in.push_back(o);
      if (o.buffer >= 0) out_.buffers[size_t(o.buffer)].last_instr = index;
      if (o.type.elem == Elem::kRoute)
        pair_rows = o.type.cols;
      else if (o.type.rows == Rows::kPair)
        pair_rows = out_.buffers[size_t(o.buffer)].rows_per_token;
    }
    for (ir::ValueId v : n.out) {
      const ir::Value& value = b.values[size_t(v)];
      Operand o{-1, 0, value.type};
      if (value.type.elem != Elem::kState)
        o.buffer =
            buffer(ir::full_name(value.name, layer), value.type, value.type.rows == Rows::kPair ? pair_rows : 1, index);
      (*values)[size_t(v)] = o;
      in.out.push_back(o);
    }
    for (const ir::WeightUse& u : n.weights) in.weights.push_back({u.role, weight(b, n, u, layer)});
    if (n.op == Op::kRoute) out_.max_k = std::max(out_.max_k, std::get<RouteParams>(n.params).k);
    if (n.op == Op::kGroupedExperts) in.scratch = grouped_scratch(in, layer, pair_rows, index);
    out_.instrs.push_back(std::move(in));
  }

  int32_t buffer(std::string name, ValueType type, int64_t rows_per_token, int32_t index) {
    Buffer b;
    b.name = std::move(name);
    b.type = type;
    b.row_stride = artifact::row_bytes(type);
    b.rows_per_token = rows_per_token;
    b.first_instr = b.last_instr = index;
    out_.buffers.push_back(std::move(b));
    return int32_t(out_.buffers.size()) - 1;
  }

  // One row of floats per token, as large as the kernel asks for.
  int32_t grouped_scratch(const Instr& in, int32_t layer, int64_t k, int32_t index) {
    const WeightTensor* down = nullptr;
    for (const auto& w : in.weights)
      if (w.role == Role::kDown) down = &out_.weights[size_t(w.tensor)].tensor;
    MI_CHECK(down != nullptr);
    const auto format = down->packing == Packing::kPackedI8     ? kernels::GemmFormat::kI8
                        : down->packing == Packing::kPackedI4   ? kernels::GemmFormat::kI4
                        : down->packing == Packing::kPackedBF16 ? kernels::GemmFormat::kBF16
                                                                : kernels::GemmFormat::kF32;
    const int64_t bytes = kernels::grouped_scratch_bytes_per_token(k, down->n, down->k, format);
    return buffer(ir::full_name(in.name + ".scratch", layer), ValueType{Rows::kToken, bytes / 4, Elem::kF32}, 1, index);
  }

  int32_t weight(const ir::Block& b, const ir::Node& n, const ir::WeightUse& u, int32_t layer) {
    WeightPlan plan;
    WeightTensor& t = plan.tensor;
    int64_t rows = 0;
    for (int32_t w : u.weights) {
      const ir::WeightDecl& d = b.weights[size_t(w)];
      plan.sources.push_back(ir::full_name(d.name, layer));
      t.name += (t.name.empty() ? "" : "+") + plan.sources.back();
      const bool matrix = is_matrix(n.op, u.role) || n.op == Op::kEmbed;
      const size_t inner = matrix ? 2 : 1;  // dimensions without the experts'
      MI_CHECK(d.shape.size() == inner || d.shape.size() == inner + 1, "{} {}", d.name, shape_text(d.shape));
      t.experts = d.shape.size() > inner ? d.shape[0] : 1;
      t.k = matrix ? d.shape.back() : 1;
      rows += d.shape[d.shape.size() - inner];
    }
    t.n = rows;
    if (is_matrix(n.op, u.role)) {
      t.packing = choose_packing(b, u, precision_);
      t.group = b.weights[size_t(u.weights[0])].group;
      t.dtype = t.packing == Packing::kPackedI8     ? DType::kI8
                : t.packing == Packing::kPackedI4   ? DType::kU8
                : t.packing == Packing::kPackedBF16 ? DType::kBF16
                                                    : DType::kF32;
      t.n_pad = kernels::pad_n(t.n);
      t.k_pad = kernels::pad_k(t.k);
    } else if (n.op == Op::kEmbed && t.k > 1) {
      t.dtype = precision_ == FloatPrecision::kBf16 ? DType::kBF16 : common_float(b, u);
      t.n_pad = t.n;
      t.k_pad = t.k;
    } else {
      t.n_pad = artifact::round_up(t.n, artifact::kPackN);
      t.k_pad = 1;
    }
    t.expert_stride = t.packing == Packing::kPlain ? t.n_pad * t.k_pad * int64_t(dtype_bytes(t.dtype))
                                                   : artifact::packed_bytes(t.packing, t.n_pad * t.k_pad);
    t.bytes = t.expert_stride * t.experts;

    const std::string key = fmt::format("{}|{}", t.name, int(t.packing));
    const auto [it, added] = known_.try_emplace(key, int32_t(out_.weights.size()));
    if (added) out_.weights.push_back(std::move(plan));
    return it->second;
  }

  // What the layer keeps per token, from the nodes that write and read it.
  Status caches(const ir::Block& b, int32_t layer) {
    artifact::LayerCache& c = out_.caches[size_t(layer)];
    std::optional<int64_t> window;
    for (const ir::Node& n : b.nodes) {
      if (n.op == Op::kKvAppend) {
        const auto& p = std::get<KvAppendParams>(n.params);
        if (c.kv_heads != 0) return bad_input("keys and values are appended twice; a layer has one KV cache");
        c.kv_heads = p.kv_heads;
        c.k_dim = p.k_dim;
        c.v_dim = p.v_dim;
      } else if (n.op == Op::kIndexAppend) {
        if (c.index_dim != 0) return bad_input("index keys are appended twice; a layer has one index cache");
        c.index_dim = std::get<IndexAppendParams>(n.params).dim;
      } else if (n.op == Op::kAttention) {
        const int64_t w = std::get<AttentionParams>(n.params).window;
        if (window && *window != w) return bad_input("two attentions with windows {} and {} share a cache", *window, w);
        window = w;
      }
    }
    c.window = window.value_or(0);
    return {};
  }

  const ir::Graph& g_;
  const FloatPrecision precision_;
  Program out_;
  std::map<std::string, int32_t> known_;  // source names and packing -> index into out_.weights
};

}  // namespace

Result<FloatPrecision> parse_precision(const std::string& name) {
  if (name.empty() || name == "keep") return FloatPrecision::kKeep;
  if (name == "fp32") return FloatPrecision::kFp32;
  if (name == "bf16") return FloatPrecision::kBf16;
  return fail(ErrorCode::kUsage, "--precision {}: expected fp32, bf16, or nothing to keep what the model has", name);
}

Result<Program> lower(const ir::Graph& g, FloatPrecision precision) { return Lowering(g, precision).run(); }

}  // namespace mi::compiler
