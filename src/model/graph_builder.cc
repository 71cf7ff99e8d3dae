#include "model/graph_builder.h"

#include <algorithm>
#include <map>

namespace mi::model {
namespace {

using ir::Mark;
using ir::ValueId;

class BlockMaker {
 public:
  BlockMaker(const ArchSpec& a, std::string name, int32_t layer, const NeedWeight& need)
      : a_(a), layer_(layer), need_(need), b_(&block_) {
    block_.name = std::move(name);
  }

  Result<ir::Block> prologue() {
    const auto w = weight("embed.weight", {a_.vocab, a_.hidden}, Mark::kEmbedding);
    b_.output(b_.node(Op::kEmbed, {}, {{Role::kWeight, {w}}}, EmbedParams{a_.embed_scale}, "x"));
    return finish();
  }

  Result<ir::Block> epilogue(bool tied) {
    ValueId x = b_.input("x", {Rows::kToken, a_.hidden, Elem::kF32});
    x = b_.node(Op::kSelectRows, {x}, {}, SelectRowsParams{}, "last");
    x = norm(x, "final_norm", a_.hidden, 1, "normed");
    x = tied ? linear(x, "embed", a_.vocab, a_.hidden, Mark::kEmbedding, false, "logits")
             : linear(x, "lm_head", a_.vocab, a_.hidden, Mark::kHead, false, "logits");
    if (a_.logits_scale != 1) x = b_.node(Op::kScale, {x}, {}, ScaleParams{a_.logits_scale}, "scaled");
    b_.output(x);
    return finish();
  }

  Result<ir::Block> layer(const LayerSpec& l) {
    ValueId x = b_.input("x", {Rows::kToken, a_.hidden, Elem::kF32});
    x = attention(x, l);
    x = l.moe ? moe(x) : dense(x);
    b_.output(x);
    block_.layers = {layer_};
    return finish();
  }

 private:
  Result<ir::Block> finish() {
    if (error_) return *error_;
    return std::move(block_);
  }

  // Asked once; the form decides dtype and format of the declaration. After an error the rest is built of defaults.
  int32_t weight(const std::string& name, const Shape& shape, Mark mark) {
    WeightInfo info;
    if (!error_) {
      auto r = need_(layer_, name, shape, mark);
      if (r.ok())
        info = *r;
      else
        error_ = r.error();
    }
    formats_[name] = info.format;
    return b_.weight({name, info.dtype, shape, info.format, mark});
  }

  ValueId quantized(ValueId x) {
    const auto [it, added] = quantized_.try_emplace(x, -1);
    if (added) it->second = b_.node(Op::kQuantize, {x}, {}, QuantizeParams{}, block_.values[size_t(x)].name + "_q");
    return it->second;
  }
  ValueId input_of(const std::string& weight_name, ValueId x) {
    return formats_[weight_name] == ir::WeightFormat::kW8A8 ? quantized(x) : x;
  }

  ValueId norm(ValueId x, const std::string& name, int64_t cols, int64_t groups, const std::string& result) {
    const int32_t w = weight(name + ".weight", {cols}, Mark::kNorm);
    return b_.node(Op::kRmsNorm, {x}, {{Role::kWeight, {w}}}, NormParams{a_.eps, a_.plus_one, groups}, result);
  }

  ValueId linear(ValueId x, const std::string& name, int64_t n, int64_t k, Mark mark, bool bias,
                 const std::string& result) {
    std::vector<ir::WeightUse> uses = {{Role::kWeight, {weight(name + ".weight", {n, k}, mark)}}};
    if (bias) uses.push_back({Role::kBias, {weight(name + ".bias", {n}, mark)}});
    return b_.node(Op::kLinear, {input_of(name + ".weight", x)}, std::move(uses), LinearParams{}, result);
  }

  ValueId expert_linear(ValueId x, ValueId route, const std::string& name, int64_t n, int64_t k,
                        const std::string& result) {
    const int64_t experts = a_.moe.route.experts;
    std::vector<ir::WeightUse> uses = {{Role::kWeight, {weight(name + ".weight", {experts, n, k}, Mark::kExpert)}}};
    if (a_.moe.expert_bias) uses.push_back({Role::kBias, {weight(name + ".bias", {experts, n}, Mark::kExpert)}});
    return b_.node(Op::kExpertLinear, {input_of(name + ".weight", x), route}, std::move(uses), ExpertLinearParams{},
                   result);
  }

  ValueId rope(ValueId x, const LayerSpec& l, int64_t heads, int64_t head_dim, const std::string& result) {
    if (l.rope < 0) return x;
    const RopeSpec& r = a_.ropes[size_t(l.rope)];
    const int32_t w = weight("rope.inv_freq", {r.rotary_dim / 2}, Mark::kConstant);
    return b_.node(Op::kRope, {x}, {{Role::kInvFreq, {w}}},
                   RopeParams{heads, head_dim, r.rotary_dim, r.interleaved, r.attention_factor}, result);
  }

  // x + factor * y
  ValueId add(ValueId x, ValueId y, const std::string& result) {
    if (a_.residual_scale != 1) y = b_.node(Op::kScale, {y}, {}, ScaleParams{a_.residual_scale}, "scaled");
    return b_.node(Op::kAdd, {x, y}, {}, AddParams{}, result);
  }

  // qk-norm and rope of one projection, in the recipe's order.
  ValueId head_norm_rope(ValueId v, const LayerSpec& l, const std::string& name, int64_t heads, int64_t head_dim,
                         QkNorm kind, float clip) {
    const auto normed = [&](ValueId u) {
      if (kind == QkNorm::kNone) return u;
      const bool full = kind == QkNorm::kFull;
      return norm(u, "attn." + name + "_norm", full ? heads * head_dim : head_dim, full ? 1 : heads, name + "_normed");
    };
    if (!a_.attention.norm_after_rope) v = normed(v);
    if (clip > 0) v = b_.node(Op::kClamp, {v}, {}, ClampParams{-clip, clip}, name + "_clipped");
    v = rope(v, l, heads, head_dim, name + "_rope");
    return a_.attention.norm_after_rope ? normed(v) : v;
  }

  ValueId attention(ValueId x, const LayerSpec& l) {
    const ArchSpec::Attention& t = a_.attention;
    const ArchSpec::Index& i = a_.index;
    const ValueId a = norm(x, "attn_norm", a_.hidden, 1, "a");
    ValueId q = linear(a, "attn.q", t.heads * t.head_dim, a_.hidden, Mark::kAttention, t.bias_q, "q");
    ValueId k = linear(a, "attn.k", t.kv_heads * t.head_dim, a_.hidden, Mark::kAttention, t.bias_k, "k");
    ValueId v = linear(a, "attn.v", t.kv_heads * t.v_dim, a_.hidden, Mark::kAttention, t.bias_v, "v");
    ValueId iq = -1, ik = -1;
    if (l.indexed) {
      iq = linear(a, "attn.index_q", i.heads * i.dim, a_.hidden, Mark::kIndex, false, "index_q");
      ik = linear(a, "attn.index_k", i.dim, a_.hidden, Mark::kIndex, false, "index_k");
    }
    q = head_norm_rope(q, l, "q", t.heads, t.head_dim, t.qk_norm, t.clip);
    k = head_norm_rope(k, l, "k", t.kv_heads, t.head_dim, t.qk_norm, t.clip);
    if (t.clip > 0) v = b_.node(Op::kClamp, {v}, {}, ClampParams{-t.clip, t.clip}, "v_clipped");
    const ValueId kv = b_.node(Op::kKvAppend, {k, v}, {}, KvAppendParams{t.kv_heads, t.head_dim, t.v_dim}, "kv");
    std::vector<ValueId> in = {q, kv};
    if (l.indexed) {
      iq = head_norm_rope(iq, l, "index_q", i.heads, i.dim, QkNorm::kPerHead, 0);
      ik = head_norm_rope(ik, l, "index_k", 1, i.dim, QkNorm::kPerHead, 0);
      const ValueId keys = b_.node(Op::kIndexAppend, {ik}, {}, IndexAppendParams{i.dim}, "index");
      in.push_back(b_.node(Op::kIndexSelect, {iq, keys}, {},
                           IndexSelectParams{i.heads, i.dim, i.block, i.topk, i.local}, "blocks"));
    }
    std::vector<ir::WeightUse> uses;
    if (t.sinks) uses.push_back({Role::kSinks, {weight("attn.sinks", {t.heads}, Mark::kAttention)}});
    const AttentionParams p{t.heads, t.kv_heads, t.head_dim, t.v_dim,
                            t.scale, l.window,   t.softcap,  l.indexed ? i.block : 0};
    const ValueId o = b_.node(Op::kAttention, std::move(in), std::move(uses), p, "o");
    return add(x, linear(o, "attn.o", a_.hidden, t.heads * t.v_dim, Mark::kAttention, t.bias_o, "attn_out"), "x_attn");
  }

  // down(act(gate m, up m)), without the residual.
  ValueId mlp(ValueId m, const std::string& name, int64_t width, Mark mark, bool bias, const std::string& prefix) {
    const ValueId g = linear(m, name + ".gate", width, a_.hidden, mark, bias, prefix + "gate");
    const ValueId u = linear(m, name + ".up", width, a_.hidden, mark, bias, prefix + "up");
    const ValueId h = b_.node(Op::kActivation, {g, u}, {}, a_.activation, prefix + "h");
    return linear(h, name + ".down", a_.hidden, width, mark, bias, prefix + "down");
  }

  ValueId dense(ValueId x) {
    const ValueId m = norm(x, "mlp_norm", a_.hidden, 1, "m");
    return add(x, mlp(m, "mlp", a_.mlp.width, Mark::kDense, a_.mlp.bias, ""), "x_out");
  }

  ValueId moe(ValueId x) {
    const ArchSpec::Moe& e = a_.moe;
    const ValueId m = norm(x, "mlp_norm", a_.hidden, 1, "m");
    const ValueId logits = linear(m, "moe.router", e.route.experts, a_.hidden, Mark::kRouter, e.router_bias, "router");
    std::vector<ir::WeightUse> uses;
    if (e.select_bias)
      uses.push_back({Role::kSelectBias, {weight("moe.select_bias", {e.route.experts}, Mark::kRouter)}});
    const ValueId route = b_.node(Op::kRoute, {logits}, std::move(uses), e.route, "route");
    const ValueId g = expert_linear(m, route, "moe.experts.gate", e.width, a_.hidden, "gate");
    const ValueId u = expert_linear(m, route, "moe.experts.up", e.width, a_.hidden, "up");
    const ValueId h = b_.node(Op::kActivation, {g, u}, {}, a_.activation, "h");
    const ValueId y = expert_linear(h, route, "moe.experts.down", a_.hidden, e.width, "down");
    x = add(x, b_.node(Op::kExpertCombine, {y, route}, {}, ExpertCombineParams{}, "routed"), "x_routed");
    if (e.shared_width == 0) return x;
    ValueId s = mlp(m, "moe.shared", e.shared_width, Mark::kSharedExpert, e.shared_bias, "shared_");
    if (e.shared_gate == SharedGate::kSigmoid) {
      const ValueId gate = linear(m, "moe.shared_gate", 1, a_.hidden, Mark::kSharedGate, false, "shared_weight");
      s = b_.node(Op::kSigmoidMul, {s, gate}, {}, SigmoidMulParams{}, "shared_gated");
    }
    return add(x, s, "x_out");
  }

  const ArchSpec& a_;
  int32_t layer_;
  const NeedWeight& need_;
  ir::Block block_;
  ir::BlockBuilder b_;
  std::map<ValueId, ValueId> quantized_;
  std::map<std::string, ir::WeightFormat> formats_;
  std::optional<Error> error_;
};

// "moe", "dense", with ".sliding" and ".sparse" where the layer has a window or a block index.
std::string block_name(const LayerSpec& l) {
  return std::string(l.moe ? "moe" : "dense") + (l.window > 0 ? ".sliding" : "") + (l.indexed ? ".sparse" : "");
}

bool same_form(const ir::Block& a, const ir::Block& b) {
  return a.weights == b.weights && a.values == b.values && a.inputs == b.inputs && a.outputs == b.outputs &&
         a.nodes == b.nodes;
}

}  // namespace

Result<ir::Graph> build_graph(const ArchSpec& a, bool tied, const NeedWeight& need) {
  ir::Graph g;
  g.info.family = a.family;
  g.info.model_type = a.model_type;
  g.info.vocab = a.vocab;
  g.info.hidden = a.hidden;
  g.info.layers = a.layers;
  g.info.max_positions = a.max_positions;
  g.info.eos_ids = a.eos_ids;
  g.info.bos_id = a.bos_id;
  g.info.pad_id = a.pad_id;
  MI_TRY(g.prologue, BlockMaker(a, "prologue", -1, need).prologue());
  for (int64_t l = 0; l < a.layers; ++l) {
    const LayerSpec& spec = a.layer[size_t(l)];
    // The same form with other ropes would share a block although inv_freq differs; that is fine: it is a weight of the
    // layer.
    MI_TRY(ir::Block b, BlockMaker(a, block_name(spec), int32_t(l), need).layer(spec));
    const auto same =
        std::find_if(g.blocks.begin(), g.blocks.end(), [&](const ir::Block& o) { return same_form(o, b); });
    if (same != g.blocks.end()) {
      same->layers.push_back(int32_t(l));
      continue;
    }
    const std::string base = b.name;
    for (int n = 2; std::any_of(g.blocks.begin(), g.blocks.end(), [&](const ir::Block& o) { return o.name == b.name; });
         ++n)
      b.name = fmt::format("{}_{}", base, n);
    g.blocks.push_back(std::move(b));
  }
  MI_TRY(g.epilogue, BlockMaker(a, "epilogue", -1, need).epilogue(tied));
  return g;
}

}  // namespace mi::model
