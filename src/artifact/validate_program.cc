// The program: one rule per op about its operands, weights and parameters, and what instructions mean to each other
// (order of layers, definition before use, caches, routes).

#include <cmath>
#include <optional>

#include "artifact/layout.h"
#include "artifact/validate.h"

namespace mi::artifact {
namespace {

// What is known of a buffer's contents once it was written.
struct Written {
  bool done = false;
  int64_t experts = 0;           // kRoute: of how many
  int64_t block = 0, heads = 0;  // kI32 selection: block size and heads
};

// The caches of the layer being checked.
struct LayerState {
  bool kv = false, index = false, output = false;
};

class Checker {
 public:
  explicit Checker(const Manifest& m) : m_(m), written_(m.buffers.size()) {}

  Status run() {
    int stage = 0;  // 0 prologue, 1 layers, 2 epilogue
    int32_t layer = -1;
    bool embedded = false;
    LayerState state;
    if (m_.program.empty()) return refuse("the program is empty");
    for (size_t i = 0; i < m_.program.size(); ++i) {
      const Instr& in = m_.program[i];
      auto failed = [&](const Status& s) {
        return s.error().with_context(fmt::format("program[{}] ({}, layer {})", i, op_name(in.op), in.layer));
      };
      if (in.layer < -1 || in.layer >= m_.model.layers)
        return failed(refuse("the model has {} layers", m_.model.layers));
      if (in.layer != layer) {
        if (stage == 2) return failed(refuse("a layer follows the epilogue"));
        if (stage == 1 && !state.output) return failed(refuse("layer {} ended without a layer_output", layer));
        const int32_t expected = stage == 0 ? 0 : layer + 1;
        if (in.layer == -1) {
          if (layer != m_.model.layers - 1)
            return failed(refuse("the epilogue follows layer {} of {}", layer, m_.model.layers));
          stage = 2;
        } else {
          if (in.layer != expected) return failed(refuse("expected layer {} here", expected));
          stage = 1;
        }
        if (auto s = check_cache_used(layer, state); !s.ok()) return failed(s);
        layer = in.layer;
        state = {};
      }
      if (auto s = check(in, int32_t(i), &state); !s.ok()) return failed(s);
      if (in.layer_output) {
        if (stage == 2) return failed(refuse("the epilogue has no layer_output"));
        if (stage == 0 ? embedded : state.output) return failed(refuse("a second layer_output"));
        if (in.out.empty() || !is(in.out[0], Rows::kToken, Elem::kF32, m_.model.hidden))
          return failed(refuse("layer_output is not [tokens, {}] floats", m_.model.hidden));
        (stage == 0 ? embedded : state.output) = true;
      }
    }
    if (stage != 2) return refuse("the program has no epilogue");
    if (!embedded) return refuse("the prologue has no layer_output");
    for (size_t b = 0; b < written_.size(); ++b)
      if (!written_[b].done) return refuse("buffers[{}] '{}' is never written", b, m_.buffers[b].name);
    const Instr& last = m_.program.back();
    if (last.out.size() != 1 || !is(last.out[0], Rows::kLogit, Elem::kF32, m_.model.vocab))
      return refuse("the last instruction does not give [rows, {}] logits", m_.model.vocab);
    if (max_k_ != m_.model.max_k)
      return refuse("model.max_k is {}, the largest route takes {}", m_.model.max_k, max_k_);
    return {};
  }

 private:
  static bool is(const Operand& o, Rows rows, Elem elem, int64_t cols) { return o.type == ValueType{rows, cols, elem}; }
  int64_t per_token(const Operand& o) const { return o.buffer < 0 ? 1 : m_.buffers[size_t(o.buffer)].rows_per_token; }

  Status check_cache_used(int32_t layer, const LayerState& s) const {
    if (layer < 0) return {};
    const LayerCache& c = m_.caches[size_t(layer)];
    if (!s.kv && (c.kv_heads != 0 || c.k_dim != 0 || c.v_dim != 0 || c.window != 0))
      return refuse("caches[{}] has keys and values that the program never writes", layer);
    if (!s.index && c.index_dim != 0) return refuse("caches[{}] has index keys that the program never writes", layer);
    return {};
  }

  Status check(const Instr& in, int32_t index, LayerState* state) {
    if (size_t(in.op) >= std::variant_size_v<OpParams> || in.params.index() != size_t(in.op))
      return refuse("parameters of another op");
    if (in.in.size() > 8 || in.out.size() > 2 || in.weights.size() > 16) return refuse("more operands than any op has");
    for (size_t i = 0; i < in.in.size(); ++i) MI_TRY_VOID(operand(in.in[i], fmt::format("in[{}]", i), index, false));
    for (size_t i = 0; i < in.out.size(); ++i) MI_TRY_VOID(operand(in.out[i], fmt::format("out[{}]", i), index, true));
    // How much scratch is enough is the kernel's to say: the executor compares at load.
    if ((in.scratch != -1) != (in.op == Op::kGroupedExperts))
      return refuse("scratch goes with grouped_experts and with nothing else");
    if (in.scratch != -1) {
      if (in.scratch < 0 || size_t(in.scratch) >= m_.buffers.size())
        return refuse("scratch buffer {} does not exist", in.scratch);
      const Buffer& b = m_.buffers[size_t(in.scratch)];
      if (written_[size_t(in.scratch)].done || b.first_instr != index || b.last_instr != index)
        return refuse("scratch '{}' is not this instruction's alone", b.name);
      written_[size_t(in.scratch)].done = true;
    }
    for (const InstrWeight& w : in.weights)
      if (w.tensor < 0 || size_t(w.tensor) >= m_.weights.size()) return refuse("weight {} does not exist", w.tensor);
    for (size_t i = 1; i < in.weights.size(); ++i)
      if (in.weights[i].role <= in.weights[i - 1].role) return refuse("weights are not in the order of their roles");
    if (!in.groups.empty() && in.op != Op::kGroupedExperts) return refuse("groups go with grouped_experts and with nothing else");
    weights_seen_ = 0;
    residual_ = -1;
    MI_TRY_VOID(std::visit([&](const auto& p) { return op(in, p, state); }, in.params));
    if (weights_seen_ != in.weights.size()) return refuse("a weight that this op does not read");
    if (in.residual != residual_) return refuse("residual {} where {} is meant", in.residual, residual_);
    return {};
  }

  Status operand(const Operand& o, const std::string& at, int32_t index, bool writes) {
    if (o.type.elem == Elem::kState) {
      if (o.buffer != -1 || o.col != 0 || o.type.cols != 0 || o.type.rows != Rows::kToken)
        return refuse("{} is a state with a buffer", at);
      return {};
    }
    if (o.buffer < 0 || size_t(o.buffer) >= m_.buffers.size())
      return refuse("{} names buffer {}, which does not exist", at, o.buffer);
    const Buffer& b = m_.buffers[size_t(o.buffer)];
    if (o.type.rows != b.type.rows || o.type.elem != b.type.elem)
      return refuse("{} reads '{}' as another kind of rows or elements", at, b.name);
    if (o.type.cols < 1 || o.col < 0 || o.col > b.type.cols || o.type.cols > b.type.cols - o.col)
      return refuse("{} takes columns {} to {} of '{}', which has {}", at, o.col,
                    o.col + std::min(o.type.cols, kMaxDim), b.name, b.type.cols);
    const bool whole = o.col == 0 && o.type.cols == b.type.cols;
    if (!whole && (writes || (o.type.elem != Elem::kF32 && o.type.elem != Elem::kI32)))
      return refuse("{} takes a part of '{}', which is only possible when reading floats", at, b.name);
    Written& w = written_[size_t(o.buffer)];
    if (writes) {
      if (w.done) return refuse("{} writes '{}' a second time", at, b.name);
      if (b.first_instr != index)
        return refuse("{} writes '{}', whose lifetime starts at {}", at, b.name, b.first_instr);
      w.done = true;
    } else {
      if (!w.done) return refuse("{} reads '{}' before it is written", at, b.name);
      if (b.last_instr < index) return refuse("{} reads '{}' after the end of its lifetime", at, b.name);
    }
    return {};
  }

  // ---- weights of one instruction ----
  const WeightTensor* find(const Instr& in, Role role) {
    for (const InstrWeight& w : in.weights)
      if (w.role == role) {
        ++weights_seen_;
        return &m_.weights[size_t(w.tensor)];
      }
    return nullptr;
  }
  Status vector_f32(const Instr& in, Role role, int64_t experts, int64_t n, bool required) {
    const WeightTensor* w = find(in, role);
    if (!w) return required ? refuse("the weight '{}' is missing", role_name(role)) : Status();
    if (w->packing != Packing::kPlain || w->dtype != DType::kF32 || w->k != 1 || w->experts != experts || w->n != n)
      return refuse("'{}' is not {} x {} plain floats", w->name, experts, n);
    return {};
  }
  // A packed matrix that multiplies x: int8 or int4 for a quantized x, float for a float x.
  Status matrix(const Instr& in, Role role, int64_t experts, int64_t n, int64_t k, std::optional<Elem> x) {
    const WeightTensor* w = find(in, role);
    if (!w) return refuse("the weight '{}' is missing", role_name(role));
    if (w->packing == Packing::kPlain) return refuse("'{}' is not packed", w->name);
    const bool quantized = w->packing == Packing::kPackedI8 || w->packing == Packing::kPackedI4;
    if (x && quantized != (*x == Elem::kQ8))
      return refuse("'{}' and its input are not both quantized or both float", w->name);
    if (w->experts != experts || w->n != n || w->k != k)
      return refuse("'{}' is {} x [{}, {}], expected {} x [{}, {}]", w->name, w->experts, w->n, w->k, experts, n, k);
    return {};
  }

  // ---- operands of one instruction ----
  static Status counts(const Instr& in, size_t in_min, size_t in_max, size_t out_min, size_t out_max) {
    if (in.in.size() < in_min || in.in.size() > in_max) return refuse("{} inputs", in.in.size());
    if (in.out.size() < out_min || in.out.size() > out_max) return refuse("{} outputs", in.out.size());
    return {};
  }
  static Status expect(const Operand& o, const char* what, Rows rows, Elem elem, int64_t cols) {
    return is(o, rows, elem, cols)
               ? Status()
               : refuse("the {} has another type than [{} columns] of the expected rows and elements", what, cols);
  }
  Status same_rows(const Operand& a, const Operand& b) const {
    return a.type.rows == b.type.rows && per_token(a) == per_token(b) ? Status()
                                                                      : refuse("operands with different rows");
  }
  static Status finite(float v, const char* what) {
    return std::isfinite(v) ? Status() : refuse("{} is not a finite number", what);
  }
  static Status positive(float v, const char* what) {
    return std::isfinite(v) && v > 0 ? Status() : refuse("{} is {}, expected a finite number above 0", what, v);
  }
  static Status not_negative(float v, const char* what) {
    return std::isfinite(v) && v >= 0 ? Status() : refuse("{} is {}, expected a finite number from 0 up", what, v);
  }
  static Status range(int64_t v, int64_t lo, int64_t hi, const char* what) {
    return v >= lo && v <= hi ? Status() : refuse("{} is {}, expected {} to {}", what, v, lo, hi);
  }
  Status residual(const Instr& in, size_t index) {
    if (in.in.size() <= index) return {};
    MI_TRY_VOID(expect(in.in[index], "residual", in.out[0].type.rows, Elem::kF32, in.out[0].type.cols));
    MI_TRY_VOID(same_rows(in.in[index], in.out[0]));
    residual_ = int32_t(index);
    return {};
  }
  Status float_map(const Instr& in) {  // one float input, one float output of the same type
    MI_TRY_VOID(counts(in, 1, 1, 1, 1));
    MI_TRY_VOID(expect(in.in[0], "input", in.out[0].type.rows, Elem::kF32, in.out[0].type.cols));
    MI_TRY_VOID(expect(in.out[0], "output", in.in[0].type.rows, Elem::kF32, in.in[0].type.cols));
    return same_rows(in.in[0], in.out[0]);
  }
  static Status activation(ActKind kind, float alpha, float limit) {
    if (kind > ActKind::kSwigluOai) return refuse("unknown activation");
    MI_TRY_VOID(finite(alpha, "alpha"));
    return not_negative(limit, "limit");
  }

  // ---- ops ----
  Status op(const Instr& in, const EmbedParams& p, LayerState*) {
    MI_TRY_VOID(counts(in, 0, 0, 1, 1));
    MI_TRY_VOID(expect(in.out[0], "output", Rows::kToken, Elem::kF32, in.out[0].type.cols));
    MI_TRY_VOID(finite(p.scale, "scale"));
    const WeightTensor* w = find(in, Role::kWeight);
    if (!w) return refuse("the table is missing");
    if (w->packing != Packing::kPlain || w->experts != 1 || w->n != m_.model.vocab || w->k != in.out[0].type.cols)
      return refuse("'{}' is not a plain [{}, {}] table", w->name, m_.model.vocab, in.out[0].type.cols);
    return {};
  }
  Status op(const Instr& in, const NormParams& p, LayerState*) {
    MI_TRY_VOID(counts(in, 1, 1, 1, 2));
    const Operand& x = in.in[0];
    MI_TRY_VOID(expect(x, "input", x.type.rows, Elem::kF32, x.type.cols));
    for (const Operand& y : in.out) {
      if (y.type.cols != x.type.cols || (y.type.elem != Elem::kF32 && y.type.elem != Elem::kQ8))
        return refuse("the output has another type than its input");
      MI_TRY_VOID(same_rows(x, y));
    }
    if (in.out.size() == 2 && (in.out[0].type.elem != Elem::kF32 || in.out[1].type.elem != Elem::kQ8))
      return refuse("two outputs are a float one and then an int8 one");
    MI_TRY_VOID(positive(p.eps, "eps"));
    MI_TRY_VOID(range(p.groups, 1, x.type.cols, "groups"));
    if (x.type.cols % p.groups != 0) return refuse("{} columns do not divide into {} groups", x.type.cols, p.groups);
    return vector_f32(in, Role::kWeight, 1, x.type.cols / p.groups, true);
  }
  Status op(const Instr& in, const QuantizeParams& p, LayerState*) {
    MI_TRY_VOID(counts(in, 1, 1, 1, 1));
    MI_TRY_VOID(expect(in.in[0], "input", in.in[0].type.rows, Elem::kF32, in.in[0].type.cols));
    MI_TRY_VOID(expect(in.out[0], "output", in.in[0].type.rows, Elem::kQ8, in.in[0].type.cols));
    MI_TRY_VOID(same_rows(in.in[0], in.out[0]));
    return vector_f32(in, Role::kInScale, 1, 1, p.saturate);
  }
  Status op(const Instr& in, const LinearParams& p, LayerState*) {
    MI_TRY_VOID(counts(in, 1, 2, 1, 1));
    const Operand &x = in.in[0], &y = in.out[0];
    if (x.type.elem != Elem::kF32 && x.type.elem != Elem::kQ8) return refuse("the input is neither float nor int8");
    MI_TRY_VOID(expect(y, "output", x.type.rows, Elem::kF32, y.type.cols));
    MI_TRY_VOID(same_rows(x, y));
    MI_TRY_VOID(finite(p.out_scale, "out_scale"));
    MI_TRY_VOID(residual(in, 1));
    MI_TRY_VOID(matrix(in, Role::kWeight, 1, y.type.cols, x.type.cols, x.type.elem));
    return vector_f32(in, Role::kBias, 1, y.type.cols, false);
  }
  Status op(const Instr& in, const ClampParams& p, LayerState*) {
    MI_TRY_VOID(float_map(in));
    MI_TRY_VOID(finite(p.lo, "lo"));
    MI_TRY_VOID(finite(p.hi, "hi"));
    return p.lo <= p.hi ? Status() : refuse("lo {} is above hi {}", p.lo, p.hi);
  }
  Status op(const Instr& in, const RopeParams& p, LayerState*) {
    MI_TRY_VOID(float_map(in));
    const Operand& x = in.in[0];
    if (x.type.rows != Rows::kToken) return refuse("only token rows have positions");
    MI_TRY_VOID(range(p.heads, 1, x.type.cols, "heads"));
    if (x.type.cols % p.heads != 0 || x.type.cols / p.heads != p.head_dim)
      return refuse("{} heads of {} are not {} columns", p.heads, p.head_dim, x.type.cols);
    return rotation(in, p);
  }
  Status rotation(const Instr& in, const RopeParams& p) {
    MI_TRY_VOID(range(p.rotary_dim, 2, p.head_dim, "rotary_dim"));
    if (p.rotary_dim % 2 != 0) return refuse("rotary_dim {} is odd", p.rotary_dim);
    MI_TRY_VOID(positive(p.attention_factor, "attention_factor"));
    return vector_f32(in, Role::kInvFreq, 1, p.rotary_dim / 2, true);
  }
  Status op(const Instr& in, const KvAppendParams& p, LayerState* s) {
    MI_TRY_VOID(counts(in, 2, 2, 1, 1));
    if (in.layer < 0) return refuse("only layers have a cache");
    if (s->kv) return refuse("the layer writes its keys and values a second time");
    const LayerCache& c = m_.caches[size_t(in.layer)];
    if (p.kv_heads != c.kv_heads || p.k_dim != c.k_dim || p.v_dim != c.v_dim)
      return refuse("writes {} heads of {} and {}, its cache holds {} of {} and {}", p.kv_heads, p.k_dim, p.v_dim,
                    c.kv_heads, c.k_dim, c.v_dim);
    MI_TRY_VOID(range(p.kv_heads, 1, kMaxDim, "kv_heads"));
    MI_TRY_VOID(range(p.k_dim, 1, kMaxDim, "k_dim"));
    MI_TRY_VOID(range(p.v_dim, 1, kMaxDim, "v_dim"));
    if (!product_is(p.kv_heads, p.k_dim, in.in[0].type.cols) || !product_is(p.kv_heads, p.v_dim, in.in[1].type.cols))
      return refuse("keys or values are not {} heads wide", p.kv_heads);
    MI_TRY_VOID(expect(in.in[0], "key", Rows::kToken, Elem::kF32, in.in[0].type.cols));
    MI_TRY_VOID(expect(in.in[1], "value", Rows::kToken, Elem::kF32, in.in[1].type.cols));
    if (p.rotary_dim != 0) MI_TRY_VOID(rotation(in, p.rope()));
    s->kv = true;
    return expect(in.out[0], "output", Rows::kToken, Elem::kState, 0);
  }
  Status op(const Instr& in, const AttentionParams& p, LayerState* s) {
    MI_TRY_VOID(counts(in, 2, 3, 1, 1));
    if (in.layer < 0 || !s->kv) return refuse("reads a cache that this layer has not written");
    const LayerCache& c = m_.caches[size_t(in.layer)];
    if (p.kv_heads != c.kv_heads || p.k_dim != c.k_dim || p.v_dim != c.v_dim || p.window != c.window)
      return refuse("does not fit the layer's cache");
    MI_TRY_VOID(range(p.heads, 1, kMaxDim, "heads"));
    if (p.heads % p.kv_heads != 0) return refuse("{} heads do not divide into {} KV heads", p.heads, p.kv_heads);
    MI_TRY_VOID(finite(p.scale, "scale"));
    MI_TRY_VOID(not_negative(p.softcap, "softcap"));
    MI_TRY_VOID(expect(in.in[0], "query", Rows::kToken, Elem::kF32, in.in[0].type.cols));
    MI_TRY_VOID(expect(in.in[1], "state", Rows::kToken, Elem::kState, 0));
    MI_TRY_VOID(expect(in.out[0], "output", Rows::kToken, Elem::kF32, in.out[0].type.cols));
    if (!product_is(p.heads, p.k_dim, in.in[0].type.cols) || !product_is(p.heads, p.v_dim, in.out[0].type.cols))
      return refuse("query or output is not {} heads wide", p.heads);
    if (in.in.size() == 3) {
      const Operand& sel = in.in[2];
      MI_TRY_VOID(expect(sel, "selection", Rows::kToken, Elem::kI32, sel.type.cols));
      const Written& w = written_[size_t(sel.buffer)];
      if (sel.col != 0 || sel.type.cols != m_.buffers[size_t(sel.buffer)].type.cols)
        return refuse("reads a part of a selection");
      if (w.heads != p.kv_heads || w.block != p.select_block || p.select_block < 1)
        return refuse("the selection is for {} heads and blocks of {}, expected {} and {}", w.heads, w.block,
                      p.kv_heads, p.select_block);
    } else if (p.select_block != 0) {
      return refuse("select_block without a selection");
    }
    return vector_f32(in, Role::kSinks, 1, p.heads, false);
  }
  Status op(const Instr& in, const IndexAppendParams& p, LayerState* s) {
    MI_TRY_VOID(counts(in, 1, 1, 1, 1));
    if (in.layer < 0) return refuse("only layers have a cache");
    if (s->index) return refuse("the layer writes its index keys a second time");
    MI_TRY_VOID(range(p.dim, 1, kMaxDim, "dim"));
    if (p.dim != m_.caches[size_t(in.layer)].index_dim)
      return refuse("writes index keys of {}, its cache holds {}", p.dim, m_.caches[size_t(in.layer)].index_dim);
    MI_TRY_VOID(expect(in.in[0], "index key", Rows::kToken, Elem::kF32, p.dim));
    s->index = true;
    return expect(in.out[0], "output", Rows::kToken, Elem::kState, 0);
  }
  Status op(const Instr& in, const IndexSelectParams& p, LayerState* s) {
    MI_TRY_VOID(counts(in, 2, 2, 1, 1));
    if (in.layer < 0 || !s->index) return refuse("reads index keys that this layer has not written");
    if (p.dim != m_.caches[size_t(in.layer)].index_dim)
      return refuse("index keys have {} columns, not {}", m_.caches[size_t(in.layer)].index_dim, p.dim);
    MI_TRY_VOID(range(p.heads, 1, kMaxDim, "heads"));
    MI_TRY_VOID(range(p.block, 1, kMaxDim, "block"));
    MI_TRY_VOID(range(p.topk, 1, kMaxDim, "topk"));
    MI_TRY_VOID(range(p.local, 0, p.topk, "local"));
    if (!product_is(p.heads, p.dim, in.in[0].type.cols))
      return refuse("the index query is not {} heads of {}", p.heads, p.dim);
    if (!product_is(p.heads, p.topk, in.out[0].type.cols))
      return refuse("the selection is not {} heads of {}", p.heads, p.topk);
    MI_TRY_VOID(expect(in.in[0], "index query", Rows::kToken, Elem::kF32, in.in[0].type.cols));
    MI_TRY_VOID(expect(in.in[1], "state", Rows::kToken, Elem::kState, 0));
    MI_TRY_VOID(expect(in.out[0], "output", Rows::kToken, Elem::kI32, in.out[0].type.cols));
    written_[size_t(in.out[0].buffer)].heads = p.heads;
    written_[size_t(in.out[0].buffer)].block = p.block;
    return {};
  }
  Status op(const Instr& in, const AddParams&, LayerState*) {
    MI_TRY_VOID(counts(in, 2, 2, 1, 1));
    for (const Operand& x : in.in) {
      MI_TRY_VOID(expect(x, "input", in.out[0].type.rows, Elem::kF32, in.out[0].type.cols));
      MI_TRY_VOID(same_rows(x, in.out[0]));
    }
    return expect(in.out[0], "output", in.out[0].type.rows, Elem::kF32, in.out[0].type.cols);
  }
  Status op(const Instr& in, const ScaleParams& p, LayerState*) {
    MI_TRY_VOID(float_map(in));
    return finite(p.factor, "factor");
  }
  Status op(const Instr& in, const ActivationParams& p, LayerState*) {
    MI_TRY_VOID(counts(in, 1, 2, 1, 1));
    MI_TRY_VOID(activation(p.kind, p.alpha, p.limit));
    const Operand& y = in.out[0];
    const int64_t cols = in.in.size() == 2 ? y.type.cols : 2 * y.type.cols;
    for (const Operand& x : in.in) {
      MI_TRY_VOID(expect(x, "input", y.type.rows, Elem::kF32, cols));
      MI_TRY_VOID(same_rows(x, y));
    }
    return expect(y, "output", y.type.rows, y.type.elem == Elem::kQ8 ? Elem::kQ8 : Elem::kF32, y.type.cols);
  }
  Status op(const Instr& in, const RouteParams& p, LayerState*) {
    MI_TRY_VOID(counts(in, 1, 1, 1, 1));
    MI_TRY_VOID(range(p.experts, 1, kMaxExperts, "experts"));
    MI_TRY_VOID(range(p.k, 1, p.experts, "k"));
    MI_TRY_VOID(expect(in.in[0], "router's logits", Rows::kToken, Elem::kF32, p.experts));
    MI_TRY_VOID(expect(in.out[0], "output", Rows::kToken, Elem::kRoute, p.k));
    if (p.score > RouteScore::kNone || p.group_by > GroupBy::kTop2) return refuse("unknown score or group_by");
    MI_TRY_VOID(not_negative(p.renorm_eps, "renorm_eps"));
    MI_TRY_VOID(not_negative(p.renorm_min, "renorm_min"));
    MI_TRY_VOID(finite(p.scale, "scale"));
    MI_TRY_VOID(range(p.groups, 1, p.experts, "groups"));
    MI_TRY_VOID(range(p.groups_keep, 1, p.groups, "groups_keep"));
    if (p.experts % p.groups != 0) return refuse("{} experts do not divide into {} groups", p.experts, p.groups);
    const int64_t group = p.experts / p.groups;
    if (p.groups > 1 && p.group_by == GroupBy::kTop2 && group < 2)
      return refuse("groups of one expert have no two best");
    if (p.groups_keep * group < p.k)
      return refuse("{} groups of {} have fewer than k = {} experts", p.groups_keep, group, p.k);
    written_[size_t(in.out[0].buffer)].experts = p.experts;
    max_k_ = std::max(max_k_, p.k);
    return vector_f32(in, Role::kSelectBias, 1, p.experts, false);
  }
  // The route operand; gives the number of experts that it chooses from.
  Status route(const Operand& r, int64_t* experts) const {
    MI_TRY_VOID(expect(r, "route", Rows::kToken, Elem::kRoute, r.type.cols));
    *experts = written_[size_t(r.buffer)].experts;
    return *experts > 0 ? Status() : refuse("the route was not made by a route instruction");
  }
  Status pairs(const Operand& o, const Operand& route) const {
    return o.type.rows != Rows::kPair || per_token(o) == route.type.cols
               ? Status()
               : refuse("pair rows are {} per token, the route has {}", per_token(o), route.type.cols);
  }
  Status op(const Instr& in, const ExpertLinearParams&, LayerState*) {
    MI_TRY_VOID(counts(in, 2, 2, 1, 1));
    const Operand &x = in.in[0], &y = in.out[0];
    int64_t experts = 0;
    MI_TRY_VOID(route(in.in[1], &experts));
    if (x.type.elem != Elem::kF32 && x.type.elem != Elem::kQ8) return refuse("the input is neither float nor int8");
    if (x.type.rows == Rows::kLogit) return refuse("the input has logit rows");
    MI_TRY_VOID(expect(y, "output", Rows::kPair, Elem::kF32, y.type.cols));
    MI_TRY_VOID(pairs(x, in.in[1]));
    MI_TRY_VOID(pairs(y, in.in[1]));
    MI_TRY_VOID(matrix(in, Role::kWeight, experts, y.type.cols, x.type.cols, x.type.elem));
    return vector_f32(in, Role::kBias, experts, y.type.cols, false);
  }
  Status op(const Instr& in, const ExpertCombineParams&, LayerState*) {
    MI_TRY_VOID(counts(in, 2, 3, 1, 1));
    int64_t experts = 0;
    MI_TRY_VOID(route(in.in[1], &experts));
    MI_TRY_VOID(expect(in.out[0], "output", Rows::kToken, Elem::kF32, in.out[0].type.cols));
    MI_TRY_VOID(expect(in.in[0], "input", Rows::kPair, Elem::kF32, in.out[0].type.cols));
    MI_TRY_VOID(pairs(in.in[0], in.in[1]));
    return residual(in, 2);
  }
  static Status groups(const Instr& in, int64_t experts) {
    std::vector<bool> seen(static_cast<size_t>(experts));
    int64_t members = 0;
    for (const std::vector<int32_t>& group : in.groups) {
      if (group.empty()) return refuse("a group without experts");
      for (const int32_t e : group) {
        if (e < 0 || e >= experts) return refuse("a group has expert {} of {}", e, experts);
        if (seen[size_t(e)]) return refuse("expert {} is in two groups", e);
        seen[size_t(e)] = true;
        ++members;
      }
    }
    return members == experts ? Status() : refuse("the groups have {} of {} experts", members, experts);
  }
  Status op(const Instr& in, const GroupedExpertsParams& p, LayerState*) {
    MI_TRY_VOID(counts(in, 2, 3, 1, 1));
    MI_TRY_VOID(activation(p.kind, p.alpha, p.limit));
    const Operand& x = in.in[0];
    int64_t experts = 0;
    MI_TRY_VOID(route(in.in[1], &experts));
    if (x.type.rows != Rows::kToken || (x.type.elem != Elem::kF32 && x.type.elem != Elem::kQ8))
      return refuse("the input is not token rows of float or int8");
    MI_TRY_VOID(expect(in.out[0], "output", Rows::kToken, Elem::kF32, in.out[0].type.cols));
    MI_TRY_VOID(residual(in, 2));
    if (!in.groups.empty()) MI_TRY_VOID(groups(in, experts));
    int64_t inner = 0;
    std::optional<Packing> packing;
    bool stored_scale = false;
    const WeightTensor* float_down = nullptr;
    const std::vector<int32_t>* slots = nullptr;
    for (const InstrWeight& w : in.weights) {
      const WeightTensor& t = m_.weights[size_t(w.tensor)];
      stored_scale |= w.role == Role::kInScale;
      if (w.role == Role::kDown && t.packing != Packing::kPackedI8 && t.packing != Packing::kPackedI4) float_down = &t;
      if (w.role == Role::kGate) {
        inner = t.n;
        packing = t.packing;
      }
      if (w.role == Role::kUp && packing != t.packing) return refuse("gate and up are packed differently");
      if (w.role != Role::kGate && w.role != Role::kUp && w.role != Role::kDown) continue;
      if (!slots) slots = &t.expert_slots;
      if (*slots != t.expert_slots) return refuse("gate, up and down have their experts in different orders");
    }
    MI_TRY_VOID(matrix(in, Role::kGate, experts, inner, x.type.cols, x.type.elem));
    MI_TRY_VOID(matrix(in, Role::kUp, experts, inner, x.type.cols, x.type.elem));
    MI_TRY_VOID(matrix(in, Role::kDown, experts, in.out[0].type.cols, inner, std::nullopt));
    MI_TRY_VOID(vector_f32(in, Role::kGateBias, experts, inner, false));
    MI_TRY_VOID(vector_f32(in, Role::kUpBias, experts, inner, false));
    MI_TRY_VOID(vector_f32(in, Role::kDownBias, experts, in.out[0].type.cols, false));
    if (stored_scale && float_down) return refuse("in_scale goes with quantized weights; '{}' is float", float_down->name);
    return vector_f32(in, Role::kInScale, 1, 1, p.saturate);
  }
  Status op(const Instr& in, const SigmoidMulParams&, LayerState*) {
    MI_TRY_VOID(counts(in, 2, 2, 1, 1));
    const Operand &x = in.in[0], &y = in.out[0];
    MI_TRY_VOID(expect(x, "input", y.type.rows, Elem::kF32, y.type.cols));
    MI_TRY_VOID(expect(in.in[1], "gate", y.type.rows, Elem::kF32, 1));
    MI_TRY_VOID(expect(y, "output", y.type.rows, Elem::kF32, y.type.cols));
    MI_TRY_VOID(same_rows(x, y));
    return same_rows(in.in[1], y);
  }
  Status op(const Instr&, const SliceParams&, LayerState*) {
    return refuse("a slice is part of an operand, never an instruction");
  }
  Status op(const Instr& in, const SelectRowsParams&, LayerState*) {
    MI_TRY_VOID(counts(in, 1, 1, 1, 1));
    MI_TRY_VOID(expect(in.in[0], "input", Rows::kToken, Elem::kF32, in.in[0].type.cols));
    return expect(in.out[0], "output", Rows::kLogit, Elem::kF32, in.in[0].type.cols);
  }

  static bool product_is(int64_t a, int64_t b, int64_t c) { return a > 0 && b > 0 && c % a == 0 && c / a == b; }

  const Manifest& m_;
  std::vector<Written> written_;
  int64_t max_k_ = 1;
  size_t weights_seen_ = 0;  // of the instruction being checked
  int32_t residual_ = -1;    // what the op's operands say
};

}  // namespace

Status validate_program(const Manifest& m) { return Checker(m).run(); }

}  // namespace mi::artifact
