#include "tools/gguf/layer.h"

#include <vector>

namespace mi::tools::gguf {
namespace {

using ir::Block;
using ir::Node;
using ir::ValueId;

// Walks a block from its results to its inputs. The first surprise sticks; what is read after it is a default.
class Walker {
 public:
  explicit Walker(const Block& b) : b_(b), maker_(b.values.size(), -1), seen_(b.nodes.size(), false) {
    for (size_t i = 0; i < b.nodes.size(); ++i)
      for (ValueId v : b.nodes[i].out) maker_[size_t(v)] = int(i);
  }

  bool is(ValueId v, Op op) const { return maker_[size_t(v)] >= 0 && b_.nodes[size_t(maker_[size_t(v)])].op == op; }
  // The node that makes v, which has to be an `op`. After a surprise: any node of the block, not to be believed.
  const Node& take(ValueId v, Op op) {
    const int i = maker_[size_t(v)];
    if (i < 0 || b_.nodes[size_t(i)].op != op) {
      surprise(v, op);
      static const Node kNone{};
      return kNone;
    }
    seen_[size_t(i)] = true;
    return b_.nodes[size_t(i)];
  }
  void surprise(ValueId v, Op wanted) {
    if (error_.empty())
      error_ = fmt::format("value {} should come from {}, it comes from {}", b_.values[size_t(v)].name, op_name(wanted),
                           maker_[size_t(v)] < 0 ? "outside" : op_name(b_.nodes[size_t(maker_[size_t(v)])].op));
  }
  void fault(std::string what) {
    if (error_.empty()) error_ = std::move(what);
  }
  bool failed() const { return !error_.empty(); }

  Weight weight(const Node& n, Role role) {
    for (const ir::WeightUse& u : n.weights) {
      if (u.role != role) continue;
      if (u.weights.size() == 1) return &b_.weights[size_t(u.weights[0])];
      fault(fmt::format("{} is stacked of {} matrices", role_name(role), u.weights.size()));
    }
    return nullptr;
  }
  Matrix matrix(const Node& n) { return {weight(n, Role::kWeight), weight(n, Role::kBias)}; }

  // Through the rounding of an int8 matrix's input.
  ValueId unquantized(ValueId v, bool* static_scale, bool* saturates) {
    if (!is(v, Op::kQuantize)) return v;
    const Node& n = take(v, Op::kQuantize);
    if (weight(n, Role::kInScale)) *(std::get<QuantizeParams>(n.params).saturate ? saturates : static_scale) = true;
    return n.in[0];
  }

  Status finish(const std::string& where) {
    for (size_t i = 0; error_.empty() && i < seen_.size(); ++i)
      if (!seen_[i]) fault(fmt::format("{} has no place in it", op_name(b_.nodes[i].op)));
    if (error_.empty()) return {};
    return bad_input("{}: GGUF is for graphs that export writes for one of its families, and block {} is none: {}",
                     where, b_.name, error_);
  }

 private:
  const Block& b_;
  std::vector<int> maker_;
  std::vector<bool> seen_;
  std::string error_;
};

class LayerReader {
 public:
  explicit LayerReader(const Block& b) : b_(b), w_(b) {}

  Result<Layer> run() {
    if (b_.inputs.size() != 1 || b_.outputs.size() != 1) return bad_input("block {} is no layer", b_.name);
    const ValueId middle = feed_forward(b_.outputs[0]);
    if (!w_.failed()) attention(middle);
    MI_TRY_VOID(w_.finish("model.mir"));
    return l_;
  }

 private:
  struct Added {
    ValueId residual = 0, y = 0;
  };
  // residual + scale * y
  Added added(ValueId v) {
    const Node& n = w_.take(v, Op::kAdd);
    if (w_.failed()) return {};
    Added a{n.in[0], n.in[1]};
    float scale = 1;
    if (w_.is(a.y, Op::kScale)) {
      const Node& s = w_.take(a.y, Op::kScale);
      scale = std::get<ScaleParams>(s.params).factor;
      a.y = s.in[0];
    }
    if (any_add_ && scale != l_.residual_scale) w_.fault("residuals are scaled differently");
    l_.residual_scale = scale;
    any_add_ = true;
    return a;
  }

  // The norm that makes v; returns its input. groups: heads of a norm per head, else 1.
  ValueId norm(ValueId v, Weight* weight, int64_t* groups = nullptr) {
    const Node& n = w_.take(v, Op::kRmsNorm);
    if (w_.failed()) return 0;
    const NormParams& p = std::get<NormParams>(n.params);
    const Weight w = w_.weight(n, Role::kWeight);
    if (any_norm_ && (p.eps != l_.eps || p.plus_one != l_.plus_one)) w_.fault("norms differ in eps or form");
    if (!groups && p.groups != 1) w_.fault("a norm of the residual stream has groups");
    if (groups) *groups = p.groups;
    if (*weight && *weight != w) w_.fault("one input is normed with two weights");
    l_.eps = p.eps;
    l_.plus_one = p.plus_one;
    any_norm_ = true;
    *weight = w;
    return n.in[0];
  }

  ValueId linear(ValueId v, Matrix* m) {
    const Node& n = w_.take(v, Op::kLinear);
    if (w_.failed()) return 0;
    if (n.in.size() != 1 || std::get<LinearParams>(n.params).out_scale != 1)
      w_.fault("a linear has a residual or a scale of its own");
    *m = w_.matrix(n);
    return w_.unquantized(n.in[0], &l_.static_scales, &l_.saturates);
  }
  ValueId expert_linear(ValueId v, ValueId route, Matrix* m) {
    const Node& n = w_.take(v, Op::kExpertLinear);
    if (w_.failed()) return 0;
    if (n.in[1] != route) w_.fault("experts of one layer have two routers");
    *m = w_.matrix(n);
    return w_.unquantized(n.in[0], &l_.static_scales, &l_.saturates);
  }

  const Node* activation(ValueId v) {
    const Node& n = w_.take(v, Op::kActivation);
    if (w_.failed()) return nullptr;
    const ActivationParams& p = std::get<ActivationParams>(n.params);
    if (n.in.size() != 2) w_.fault("gate and up are one value");
    if (any_activation_ && p != l_.activation) w_.fault("activations differ");
    l_.activation = p;
    any_activation_ = true;
    return w_.failed() ? nullptr : &n;
  }

  void same_input(ValueId* input, ValueId v) {
    if (*input >= 0 && *input != v) w_.fault("parts that should read one value read two");
    *input = v;
  }

  void mlp(ValueId v, Mlp* m, ValueId* input) {
    const ValueId h = linear(v, &m->down);
    if (w_.failed()) return;
    const Node* act = activation(h);
    if (!act) return;
    same_input(input, linear(act->in[0], &m->gate));
    same_input(input, linear(act->in[1], &m->up));
  }

  void experts(ValueId v, ValueId* input) {
    const Node& combine = w_.take(v, Op::kExpertCombine);
    if (w_.failed()) return;
    if (combine.in.size() != 2) return w_.fault("experts add a residual");
    l_.moe = true;
    const ValueId route = combine.in[1];
    const ValueId h = expert_linear(combine.in[0], route, &l_.mlp.down);
    if (w_.failed()) return;
    const Node* act = activation(h);
    if (!act) return;
    same_input(input, expert_linear(act->in[0], route, &l_.mlp.gate));
    same_input(input, expert_linear(act->in[1], route, &l_.mlp.up));
    const Node& r = w_.take(route, Op::kRoute);
    if (w_.failed()) return;
    l_.route = std::get<RouteParams>(r.params);
    l_.select_bias = w_.weight(r, Role::kSelectBias);
    same_input(input, linear(r.in[0], &l_.router));
  }

  ValueId feed_forward(ValueId out) {
    ValueId input = -1;
    Added a = added(out);
    if (w_.failed()) return 0;
    const bool gated = w_.is(a.y, Op::kSigmoidMul);
    if (w_.is(a.y, Op::kExpertCombine)) {
      experts(a.y, &input);
    } else if (gated || w_.is(a.residual, Op::kAdd)) {
      // Either a shared expert over routed ones, or a dense MLP over the attention's sum: what the inner sum adds
      // tells.
      const Node& inner = w_.take(a.residual, Op::kAdd);
      if (w_.failed()) return 0;
      const ValueId y = w_.is(inner.in[1], Op::kScale) ? w_.take(inner.in[1], Op::kScale).in[0] : inner.in[1];
      if (w_.is(y, Op::kExpertCombine)) {
        ValueId shared = a.y;
        if (gated) {
          const Node& mul = w_.take(a.y, Op::kSigmoidMul);
          Matrix gate;
          same_input(&input, linear(mul.in[1], &gate));
          l_.shared_gate = gate.weight;
          if (gate.bias) w_.fault("the shared expert's gate has a bias");
          shared = mul.in[0];
        }
        mlp(shared, &l_.shared, &input);
        a = added(a.residual);
        if (!w_.failed()) experts(a.y, &input);
      } else {
        mlp(a.y, &l_.mlp, &input);
      }
    } else {
      w_.surprise(a.residual, Op::kAdd);
    }
    if (w_.failed()) return 0;
    const ValueId x = norm(input, &l_.mlp_norm);
    if (!w_.failed() && x != a.residual) w_.fault("the feed-forward part does not read the stream it adds to");
    return x;
  }

  // A projection with its norm, clamp and rope, from the result back.
  struct Projection {
    Matrix matrix;
    Weight norm = nullptr;
    QkNorm kind = QkNorm::kNone;
    float clip = 0;
    bool roped = false, norm_after_rope = false;
  };
  Projection projection(ValueId v, int64_t head_dim, ValueId* input) {
    Projection p;
    const auto take_norm = [&] {
      int64_t groups = 1;
      v = norm(v, &p.norm, &groups);
      if (!w_.failed()) p.kind = groups == 1 && p.norm->shape[0] != head_dim ? QkNorm::kFull : QkNorm::kPerHead;
    };
    if (w_.is(v, Op::kRmsNorm)) {
      p.norm_after_rope = true;
      take_norm();
    }
    if (!w_.failed() && w_.is(v, Op::kRope)) {
      const Node& n = w_.take(v, Op::kRope);
      RopeParams r = std::get<RopeParams>(n.params);
      r.heads = r.head_dim = 0;  // the only fields in which the projections of a layer differ
      const Weight f = w_.weight(n, Role::kInvFreq);
      if (l_.inv_freq && (f != l_.inv_freq || r != l_.rope)) w_.fault("q and k are rotated differently");
      l_.rope = r;
      l_.inv_freq = f;
      p.roped = true;
      v = n.in[0];
    }
    if (!w_.failed() && w_.is(v, Op::kClamp)) {
      const Node& n = w_.take(v, Op::kClamp);
      const ClampParams& c = std::get<ClampParams>(n.params);
      if (c.lo != -c.hi) w_.fault("a projection is clamped unevenly");
      p.clip = c.hi;
      v = n.in[0];
    }
    if (!w_.failed() && !p.norm && w_.is(v, Op::kRmsNorm)) take_norm();
    if (!w_.failed()) same_input(input, linear(v, &p.matrix));
    p.norm_after_rope = p.norm_after_rope && p.roped;
    return p;
  }

  void attention(ValueId middle) {
    const Added a = added(middle);
    if (w_.failed()) return;
    const ValueId o = linear(a.y, &l_.o);
    if (w_.failed()) return;
    const Node& n = w_.take(o, Op::kAttention);
    if (w_.failed()) return;
    l_.attention = std::get<AttentionParams>(n.params);
    l_.sinks = w_.weight(n, Role::kSinks);
    const Node& kv = w_.take(n.in[1], Op::kKvAppend);
    if (w_.failed()) return;
    ValueId input = -1;
    const Projection q = projection(n.in[0], l_.attention.k_dim, &input);
    const Projection k = projection(kv.in[0], l_.attention.k_dim, &input);
    const Projection v = projection(kv.in[1], l_.attention.v_dim, &input);
    l_.q = q.matrix;
    l_.k = k.matrix;
    l_.v = v.matrix;
    l_.q_norm = q.norm;
    l_.k_norm = k.norm;
    l_.qk_norm = q.kind;
    l_.norm_after_rope = q.norm_after_rope;
    l_.clip = q.clip;
    if (q.kind != k.kind || q.norm_after_rope != k.norm_after_rope) w_.fault("q and k are normed differently");
    if (q.clip != k.clip || q.clip != v.clip) w_.fault("q, k and v are clamped differently");
    if (q.roped != k.roped || v.roped || v.norm) w_.fault("q, k or v is rotated or normed in an unknown way");
    if (!w_.failed() && n.in.size() == 3) index(n.in[2], &input);
    if (w_.failed()) return;
    if (norm(input, &l_.attn_norm) != b_.inputs[0] || a.residual != b_.inputs[0])
      w_.fault("attention does not read the layer's input");
  }

  void index(ValueId selection, ValueId* input) {
    const Node& n = w_.take(selection, Op::kIndexSelect);
    if (w_.failed()) return;
    l_.index = std::get<IndexSelectParams>(n.params);
    const Node& keys = w_.take(n.in[1], Op::kIndexAppend);
    if (w_.failed()) return;
    const Projection q = projection(n.in[0], l_.index.dim, input);
    const Projection k = projection(keys.in[0], l_.index.dim, input);
    l_.index_q = q.matrix.weight;
    l_.index_k = k.matrix.weight;
    l_.index_q_norm = q.norm;
    l_.index_k_norm = k.norm;
    if (q.matrix.bias || k.matrix.bias || q.clip != 0 || k.clip != 0 || !q.roped || !k.roped || q.norm_after_rope ||
        k.norm_after_rope || q.kind != QkNorm::kPerHead || k.kind != QkNorm::kPerHead)
      w_.fault("the block index is built in an unknown way");
  }

  const Block& b_;
  Walker w_;
  Layer l_;
  bool any_add_ = false, any_norm_ = false, any_activation_ = false;
};

}  // namespace

Result<Layer> read_layer(const ir::Block& b) { return LayerReader(b).run(); }

Result<Ends> read_ends(const ir::Graph& g) {
  Ends e;
  bool ignored = false;
  {
    Walker w(g.prologue);
    const Node& n = w.take(g.prologue.outputs[0], Op::kEmbed);
    if (!w.failed()) {
      e.embed = w.weight(n, Role::kWeight);
      e.embed_scale = std::get<EmbedParams>(n.params).scale;
    }
    MI_TRY_VOID(w.finish("model.mir"));
  }
  Walker w(g.epilogue);
  ValueId v = g.epilogue.outputs[0];
  if (w.is(v, Op::kScale)) {
    const Node& n = w.take(v, Op::kScale);
    e.logits_scale = std::get<ScaleParams>(n.params).factor;
    v = n.in[0];
  }
  const Node& head = w.take(v, Op::kLinear);
  if (!w.failed()) {
    e.head = w.weight(head, Role::kWeight);
    if (w.weight(head, Role::kBias)) w.fault("the output head has a bias");
    const Node& norm = w.take(w.unquantized(head.in[0], &ignored, &ignored), Op::kRmsNorm);
    if (!w.failed()) {
      const NormParams& p = std::get<NormParams>(norm.params);
      e.final_norm = w.weight(norm, Role::kWeight);
      e.eps = p.eps;
      e.plus_one = p.plus_one;
      w.take(norm.in[0], Op::kSelectRows);
    }
  }
  MI_TRY_VOID(w.finish("model.mir"));
  return e;
}

}  // namespace mi::tools::gguf
