#pragma once
// The operations of a model and their parameters: the one vocabulary shared by the graph (ir), the engine file
// (artifact) and the executor (exec). Numerics of each op are defined by its scalar kernel (src/kernels);
// formulas are given here.
//
// Rows and columns. Every value is a matrix: rows are tokens of the step (kToken, T of them), (token, chosen expert)
// pairs in token-major order (kPair, T*k), or the rows whose logits are wanted (kLogit). Columns are static.
// A value's element kind says how a row is stored:
//   kF32    float
//   kQ8     int8 [cols] with one float scale for the row: value = q * scale, q in [-127, 127],
//           scale = max|x| / 127 (a row of zeros: scale 0), unless kQuantize has one stored
//   kI32    int32
//   kRoute  k expert ids (int32, ascending expert id) and k combine weights (float)
//   kState  no data: the order of effects on a cache (the KV cache or the index-key cache)

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace mi {

enum class Op : uint8_t {
  kEmbed,           // ids -> x                      x[t] = scale * W[id_t]
  kRmsNorm,         // x -> y, yq, or both           groups of cols/groups columns each; weight [cols/groups]
  kQuantize,        // x -> q                        per-row symmetric int8; weight in_scale [1]: see QuantizeParams
  kLinear,          // x [, residual] -> y           y = (x W^T + b) * out_scale [+ residual]; W [N, K], several W are stacked along N
  kClamp,           // x -> y
  kRope,            // x -> y                        rotates the first rotary_dim of each head by position * inv_freq
  kKvAppend,        // k, v -> state                 writes the step's keys and values into the layer's KV pages; see KvAppendParams
  kAttention,       // q, state [, selection] -> o   causal attention over the layer's KV pages
  kIndexAppend,     // ki -> state                   writes index keys
  kIndexSelect,     // qi, state -> selection        blocks of the context to attend to, per index head
  kAdd,             // a, b -> a + b
  kScale,           // x -> x * factor
  kActivation,      // gate, up -> h or its int8 form (as kQuantize without in_scale); or gate|up side by side in one input
  kRoute,           // logits -> route               weights: optional select_bias [E]
  kExpertLinear,    // x, route -> y[pairs]          pair (t, e): y = W[e] x + b[e]; x has token or pair rows
  kExpertCombine,   // y[pairs], route [, residual] -> out   sum over the token's pairs, ascending expert id, starting from 0; then + residual
  kGroupedExperts,  // x, route [, residual] -> out  the three expert linears, activation, requantize and combine in one kernel
  kSigmoidMul,      // y, g[1 column] -> y * sigmoid(g)
  kSlice,           // x -> view of columns [start, start+len)
  kSelectRows,      // x[token rows] -> x[logit rows]
};

enum class Rows : uint8_t { kToken, kPair, kLogit };
enum class Elem : uint8_t { kF32, kQ8, kI32, kRoute, kState };

struct ValueType {
  Rows rows = Rows::kToken;
  int64_t cols = 0;       // for kRoute: k; for kState: 0
  Elem elem = Elem::kF32;
  bool operator==(const ValueType&) const = default;
};

// Each parameter struct lists its fields once, in visit(); printing, parsing, JSON and equality come from that list
// (op_fields.h). A field equal to its default is not printed.

struct EmbedParams {
  float scale = 1;
  bool operator==(const EmbedParams&) const = default;
  template <class S, class V> static void visit(S& s, V&& v) { v("scale", s.scale); }
};

// y = x / sqrt(mean(x^2) + eps) * (w + plus_one)
struct NormParams {
  float eps = 1e-6f;
  bool plus_one = false;
  int64_t groups = 1;
  bool operator==(const NormParams&) const = default;
  template <class S, class V> static void visit(S& s, V&& v) { v("eps", s.eps); v("plus_one", s.plus_one); v("groups", s.groups); }
};

// With a weight in_scale [1]: every row has that scale, and what is beyond 127 of it is cut. saturate: rows keep their own
// scale as long as it is not above in_scale, else they have in_scale.
struct QuantizeParams {
  bool saturate = false;
  bool operator==(const QuantizeParams&) const = default;
  template <class S, class V> static void visit(S& s, V&& v) { v("saturate", s.saturate); }
};

struct LinearParams {
  float out_scale = 1;
  bool operator==(const LinearParams&) const = default;
  template <class S, class V> static void visit(S& s, V&& v) { v("out_scale", s.out_scale); }
};

struct ClampParams {
  float lo = 0, hi = 0;
  bool operator==(const ClampParams&) const = default;
  template <class S, class V> static void visit(S& s, V&& v) { v("lo", s.lo); v("hi", s.hi); }
};

// half style: pairs (x_i, x_{i + rotary_dim/2}); interleaved: pairs (x_2i, x_2i+1). cos and sin are multiplied by
// attention_factor. inv_freq [rotary_dim/2] is a weight, computed at export from the config's rope scaling.
struct RopeParams {
  int64_t heads = 0, head_dim = 0, rotary_dim = 0;
  bool interleaved = false;
  float attention_factor = 1;
  bool operator==(const RopeParams&) const = default;
  template <class S, class V> static void visit(S& s, V&& v) {
    v("heads", s.heads); v("head_dim", s.head_dim); v("rotary_dim", s.rotary_dim); v("interleaved", s.interleaved); v("attention_factor", s.attention_factor);
  }
};

// rotary_dim > 0: the keys are rotated first, as kRope with heads = kv_heads, head_dim = k_dim and the weight inv_freq does.
struct KvAppendParams {
  int64_t kv_heads = 0, k_dim = 0, v_dim = 0, rotary_dim = 0;
  bool interleaved = false;
  float attention_factor = 1;
  RopeParams rope() const { return {kv_heads, k_dim, rotary_dim, interleaved, attention_factor}; }
  bool operator==(const KvAppendParams&) const = default;
  template <class S, class V> static void visit(S& s, V&& v) {
    v("kv_heads", s.kv_heads); v("k_dim", s.k_dim); v("v_dim", s.v_dim); v("rotary_dim", s.rotary_dim); v("interleaved", s.interleaved);
    v("attention_factor", s.attention_factor);
  }
};

// o_h(t) = sum_j softmax_j(scale * q_h(t).k_g(j)) v_g(j), g = h / (heads / kv_heads), j <= t; window > 0: t - j < window.
// Optional weight sinks [heads]: the denominator gains exp(sink_h). softcap > 0: score = softcap * tanh(score / softcap).
// With a selection (cols = kv_heads * topk): only keys in the blocks listed for KV head g, blocks of select_block tokens.
struct AttentionParams {
  int64_t heads = 0, kv_heads = 0, k_dim = 0, v_dim = 0;
  float scale = 1;
  int64_t window = 0;
  float softcap = 0;
  int64_t select_block = 0;
  bool operator==(const AttentionParams&) const = default;
  template <class S, class V> static void visit(S& s, V&& v) {
    v("heads", s.heads); v("kv_heads", s.kv_heads); v("k_dim", s.k_dim); v("v_dim", s.v_dim); v("scale", s.scale);
    v("window", s.window); v("softcap", s.softcap); v("select_block", s.select_block);
  }
};

struct IndexAppendParams {
  int64_t dim = 0;
  bool operator==(const IndexAppendParams&) const = default;
  template <class S, class V> static void visit(S& s, V&& v) { v("dim", s.dim); }
};

// Per index head h and token t: block score = max over the block's keys j <= t of qi_h(t).ki(j) (float, unscaled);
// the `local` blocks ending at t's own score +inf; the topk best blocks, ties to the lower id, listed ascending, -1 fills up.
struct IndexSelectParams {
  int64_t heads = 0, dim = 0, block = 0, topk = 0, local = 1;
  bool operator==(const IndexSelectParams&) const = default;
  template <class S, class V> static void visit(S& s, V&& v) { v("heads", s.heads); v("dim", s.dim); v("block", s.block); v("topk", s.topk); v("local", s.local); }
};

struct AddParams {
  bool operator==(const AddParams&) const = default;
  template <class S, class V> static void visit(S&, V&&) {}
};

struct ScaleParams {
  float factor = 1;
  bool operator==(const ScaleParams&) const = default;
  template <class S, class V> static void visit(S& s, V&& v) { v("factor", s.factor); }
};

enum class ActKind : uint8_t {
  kSilu,        // silu(g) * u
  kGelu,        // gelu_erf(g) * u
  kGeluTanh,    // gelu_tanh(g) * u
  kRelu,        // relu(g) * u
  kSwigluOai,   // g = min(g, limit), u = clamp(u, +-limit): (u + 1) * g * sigmoid(alpha * g)
};
struct ActivationParams {
  ActKind kind = ActKind::kSilu;
  float alpha = 1.702f;
  float limit = 0;
  bool operator==(const ActivationParams&) const = default;
  template <class S, class V> static void visit(S& s, V&& v) { v("kind", s.kind); v("alpha", s.alpha); v("limit", s.limit); }
};

enum class RouteScore : uint8_t { kSoftmax, kSigmoid, kNone };
enum class GroupBy : uint8_t { kMax, kTop2 };
// p = score(logits); c = p + select_bias; groups > 1: group score by max or by the sum of the two largest c, keep
// groups_keep groups, others' c become fill (-inf or 0); ids = top k of c (ties to the lower id); w = p[ids];
// softmax_after: w = softmax(w); renorm: w /= max(sum + renorm_eps, renorm_min); w *= scale.
struct RouteParams {
  int64_t experts = 0, k = 0;
  RouteScore score = RouteScore::kSoftmax;
  bool softmax_after = false;
  bool renorm = false;
  float renorm_eps = 0, renorm_min = 0;
  float scale = 1;
  int64_t groups = 1, groups_keep = 1;
  GroupBy group_by = GroupBy::kTop2;
  bool group_fill_zero = false;
  bool operator==(const RouteParams&) const = default;
  template <class S, class V> static void visit(S& s, V&& v) {
    v("experts", s.experts); v("k", s.k); v("score", s.score); v("softmax_after", s.softmax_after); v("renorm", s.renorm);
    v("renorm_eps", s.renorm_eps); v("renorm_min", s.renorm_min); v("scale", s.scale); v("groups", s.groups);
    v("groups_keep", s.groups_keep); v("group_by", s.group_by); v("group_fill_zero", s.group_fill_zero);
  }
};

struct ExpertLinearParams {
  bool operator==(const ExpertLinearParams&) const = default;
  template <class S, class V> static void visit(S&, V&&) {}
};
struct ExpertCombineParams {
  bool operator==(const ExpertCombineParams&) const = default;
  template <class S, class V> static void visit(S&, V&&) {}
};
// h = act(W_gate[e] x + b, W_up[e] x + b); requantized per pair when the down weight is int8, by in_scale and saturate as
// in kQuantize; y = W_down[e] h + b; combined as in kExpertCombine. Bit-equal to the chain of single ops.
struct GroupedExpertsParams {
  ActKind kind = ActKind::kSilu;
  float alpha = 1.702f;
  float limit = 0;
  bool saturate = false;
  ActivationParams activation() const { return {kind, alpha, limit}; }
  bool operator==(const GroupedExpertsParams&) const = default;
  template <class S, class V> static void visit(S& s, V&& v) { v("kind", s.kind); v("alpha", s.alpha); v("limit", s.limit); v("saturate", s.saturate); }
};
struct SigmoidMulParams {
  bool operator==(const SigmoidMulParams&) const = default;
  template <class S, class V> static void visit(S&, V&&) {}
};
struct SliceParams {
  int64_t start = 0, len = 0;
  bool operator==(const SliceParams&) const = default;
  template <class S, class V> static void visit(S& s, V&& v) { v("start", s.start); v("len", s.len); }
};
struct SelectRowsParams {
  bool operator==(const SelectRowsParams&) const = default;
  template <class S, class V> static void visit(S&, V&&) {}
};

// The alternative's index equals the Op's value.
using OpParams = std::variant<EmbedParams, NormParams, QuantizeParams, LinearParams, ClampParams, RopeParams, KvAppendParams,
                              AttentionParams, IndexAppendParams, IndexSelectParams, AddParams, ScaleParams, ActivationParams, RouteParams,
                              ExpertLinearParams, ExpertCombineParams, GroupedExpertsParams, SigmoidMulParams, SliceParams, SelectRowsParams>;

// What a weight is to the op that reads it; the order is the order of printing.
enum class Role : uint8_t { kWeight, kBias, kGate, kGateBias, kUp, kUpBias, kDown, kDownBias, kInvFreq, kSinks, kSelectBias, kInScale };

std::string_view op_name(Op op);          // "rms_norm", ...
std::string_view role_name(Role role);    // "weight", ...

}  // namespace mi
