#include "tools/gguf/arch.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/check.h"
#include "model/gguf_arch.h"
#include "tools/gguf/layer.h"

namespace mi::tools::gguf {
namespace {

enum class Use : uint8_t { kNo, kMay, kMust };
enum class Layers : uint8_t { kDense, kMoe, kDenseThenMoe };
enum class Router : uint8_t {
  kSoftmax,
  kSoftmaxNormed,
  kByKeys
};                                                      // kByKeys: gating function, and with route_keys norm and scale
enum class Shared : uint8_t { kNone, kWidth, kCount };  // by which key its width is given

// What an architecture's graph can be.
struct Rule {
  const char* family;
  QkNorm qk_norm = QkNorm::kNone;
  Use has_qk_norm = Use::kMust;  // where qk_norm is not kNone
  Use qkv_bias = Use::kNo, out_bias = Use::kNo, mlp_bias = Use::kNo;
  bool any_head_dim = true;   // false: heads * head_dim is the hidden size
  bool grouped_heads = true;  // false: as many key-value heads as heads
  bool partial_rope = false, rope_factors = false;
  bool tied = false;    // the head may be left out of the file
  bool scales = false;  // embedding, residual, attention and logits have factors
  Layers layers = Layers::kMoe;
  Router router = Router::kSoftmaxNormed;
  bool route_keys = false;
  Use select_bias = Use::kNo;
  Shared shared = Shared::kNone;
  Use has_shared = Use::kMust;  // where shared is not kNone
  bool shared_gate = false;
  bool expert_width_key = true;  // false: feed_forward_length is the experts' width
  bool moe_step = false;         // wants interleave_moe_layer_step
  bool index = false;            // swiglu_oai and a block index in every MoE layer
};

const Rule kRules[] = {
    {.family = "dots1",
     .qk_norm = QkNorm::kPerHead,
     .grouped_heads = false,
     .layers = Layers::kDenseThenMoe,
     .router = Router::kByKeys,
     .route_keys = true,
     .select_bias = Use::kMay,
     .shared = Shared::kCount},
    {.family = "ernie4_5_moe",
     .tied = true,
     .layers = Layers::kDenseThenMoe,
     .select_bias = Use::kMay,
     .shared = Shared::kWidth,
     .has_shared = Use::kMay,
     .moe_step = true},
    {.family = "glm4_moe",
     .qk_norm = QkNorm::kPerHead,
     .has_qk_norm = Use::kMay,
     .qkv_bias = Use::kMay,
     .partial_rope = true,
     .tied = true,
     .layers = Layers::kDenseThenMoe,
     .router = Router::kByKeys,
     .route_keys = true,
     .select_bias = Use::kMust,
     .shared = Shared::kCount},
    {.family = "granitemoe", .rope_factors = true, .tied = true, .scales = true, .expert_width_key = false},
    {.family = "llama",
     .qkv_bias = Use::kMay,
     .out_bias = Use::kMay,
     .mlp_bias = Use::kMay,
     .rope_factors = true,
     .tied = true,
     .layers = Layers::kDense},
    {.family = "minimax_m2",
     .qk_norm = QkNorm::kFull,
     .partial_rope = true,
     .router = Router::kByKeys,
     .select_bias = Use::kMust},
    {.family = "minimax_m3",
     .qk_norm = QkNorm::kPerHead,
     .partial_rope = true,
     .layers = Layers::kDenseThenMoe,
     .router = Router::kByKeys,
     .route_keys = true,
     .select_bias = Use::kMust,
     .shared = Shared::kCount,
     .index = true},
    {.family = "mixtral", .rope_factors = true, .tied = true, .expert_width_key = false},
    {.family = "olmoe",
     .qk_norm = QkNorm::kFull,
     .any_head_dim = false,
     .grouped_heads = false,
     .router = Router::kSoftmax,
     .expert_width_key = false},
    {.family = "qwen2_moe",
     .qkv_bias = Use::kMust,
     .any_head_dim = false,
     .router = Router::kSoftmax,
     .shared = Shared::kWidth,
     .shared_gate = true},
    {.family = "qwen3", .qk_norm = QkNorm::kPerHead, .tied = true, .layers = Layers::kDense},
    {.family = "qwen3_moe", .qk_norm = QkNorm::kPerHead, .tied = true},
};

bool near(double a, double b) { return std::fabs(a - b) <= 1e-6 * std::fabs(b); }

class GgufPlanner {
 public:
  GgufPlanner(const ir::MirDir& m, const Rule& r) : m_(m), g_(m.graph), r_(r), names_(*model::find_gguf_family(r.family)) {
    plan_.arch = names_.arch;
  }

  Result<FilePlan> run() {
    MI_TRY(ends_, read_ends(g_));
    for (const ir::Block& b : g_.blocks) {
      MI_TRY(Layer l, read_layer(b));
      kinds_.emplace(&b, std::move(l));
    }
    for (int32_t i = 0; i < g_.info.layers; ++i) layers_.push_back(&kinds_.at(&g_.block_of(i)));
    if (layers_.empty()) return refuse("no layers", "at least one");
    for (const Layer* l : layers_) {
      MI_TRY_VOID(check_attention(*l));
      MI_TRY_VOID(check_feed_forward(*l));
      MI_TRY_VOID(check_alike(*l));
    }
    MI_TRY_VOID(check_ends());
    MI_TRY_VOID(check_kinds());
    MI_TRY_VOID(rope());
    if (std::any_of(layers_.begin(), layers_.end(), [](const Layer* l) { return l->static_scales; }))
      plan_.notes.push_back("the calibrated scales of activations are left out: GGUF has no place for them");
    if (std::any_of(layers_.begin(), layers_.end(), [](const Layer* l) { return l->saturates; }))
      plan_.notes.push_back("the numbers at which scales per token saturate are left out: GGUF has no place for them");
    put_keys();
    add_top();
    for (int32_t i = 0; i < g_.info.layers; ++i) add_layer(i);
    return std::move(plan_);
  }

 private:
  const Layer& first() const { return *layers_.front(); }
  const Layer& last() const { return *layers_.back(); }  // MoE if any layer is
  std::string key(const char* name) const { return fmt::format("{}.{}", names_.arch, name); }

  Error refuse(const std::string& what, const std::string& wanted) const {
    return bad_input(
        "{}: this model has {}; the architecture {} of llama.cpp has {}, so it would answer differently there",
        m_.dir.string(), what, names_.arch, wanted);
  }
  Status use(Use u, bool there, const std::string& what) const {
    if (there && u == Use::kNo) return refuse(what, "none");
    if (!there && u == Use::kMust) return refuse("no " + what, "one");
    return {};
  }

  Status check_attention(const Layer& l) const {
    const AttentionParams& a = l.attention;
    if (a.k_dim != a.v_dim)
      return refuse(fmt::format("keys of {} and values of {}", a.k_dim, a.v_dim), "one head size");
    if (a.softcap != 0) return refuse("capped attention scores", "none");
    if (a.window > 0 && a.window < g_.info.max_positions)
      return refuse(fmt::format("a sliding window of {} tokens", a.window), "none");
    if (l.sinks) return refuse("attention sinks", "none");
    if (l.clip != 0) return refuse(fmt::format("q, k and v clamped to {}", l.clip), "no clamp");
    if (!r_.scales && !near(a.scale, 1 / std::sqrt(double(a.k_dim))))
      return refuse(fmt::format("attention scores scaled by {}", a.scale), "one over the root of the head size");
    if (l.norm_after_rope) return refuse("q and k normed after the rotation", "the norm before it");
    if (l.qk_norm != QkNorm::kNone && l.qk_norm != r_.qk_norm)
      return refuse(l.qk_norm == QkNorm::kFull ? "q and k normed over all heads" : "q and k normed per head",
                    r_.qk_norm == QkNorm::kNone ? "no norm" : "the other kind");
    if (r_.qk_norm != QkNorm::kNone) MI_TRY_VOID(use(r_.has_qk_norm, l.qk_norm != QkNorm::kNone, "norm of q and k"));
    MI_TRY_VOID(use(r_.qkv_bias, l.q.bias || l.k.bias || l.v.bias, "bias of q, k and v"));
    if (bool(l.q.bias) != bool(l.k.bias) || bool(l.q.bias) != bool(l.v.bias))
      return refuse("a bias on some of q, k and v", "all or none");
    MI_TRY_VOID(use(r_.out_bias, l.o.bias, "bias of the attention's output"));
    if (!r_.any_head_dim && a.heads * a.k_dim != g_.info.hidden)
      return refuse(fmt::format("{} heads of {}", a.heads, a.k_dim),
                    fmt::format("heads that make up the hidden size {}", g_.info.hidden));
    if (!r_.grouped_heads && a.heads != a.kv_heads)
      return refuse(fmt::format("{} key-value heads for {} heads", a.kv_heads, a.heads), "as many as heads");
    if (l.rope.rotary_dim == 0) return refuse("a layer without rotation", "one in every layer");
    if (l.rope.interleaved && !names_.pairs) return refuse("rotation of neighbouring pairs", "rotation of halves");
    if (l.rope.rotary_dim != a.k_dim && !r_.partial_rope)
      return refuse(fmt::format("{} of {} dimensions rotated", l.rope.rotary_dim, a.k_dim), "all");
    if (l.rope.attention_factor != 1)
      return refuse("rotations scaled in length (yarn)", "none that convert could describe");
    return {};
  }

  Status check_router(const Layer& l) const {
    const RouteParams& p = l.route;
    // Softmax over the chosen is the same as softmax over all divided by the chosen ones' sum.
    const bool softmax = p.score == RouteScore::kSoftmax || (p.score == RouteScore::kNone && p.softmax_after);
    const bool normed = p.renorm || p.score == RouteScore::kNone;
    if (p.score != RouteScore::kNone && p.softmax_after) return refuse("a softmax over scores", "none");
    if (p.score == RouteScore::kNone && (!p.softmax_after || p.renorm))
      return refuse("unbounded router weights", "a softmax");
    if (p.groups > 1 && p.groups_keep < p.groups) return refuse("experts chosen by groups", "one group");
    if (p.renorm_eps > 1e-12f || p.renorm_min > 6e-5f)
      return refuse("a floor under the sum of the router's weights", "none");
    if (r_.router != Router::kByKeys) {
      if (!softmax) return refuse("a sigmoid router", "a softmax");
      if (normed != (r_.router == Router::kSoftmaxNormed))
        return refuse(normed ? "router weights divided by their sum" : "router weights not divided by their sum",
                      normed ? "them undivided" : "them divided");
    } else if (!r_.route_keys && !normed) {
      return refuse("router weights not divided by their sum", "them divided");
    }
    if (p.scale != 1 && !r_.route_keys)
      return refuse(fmt::format("router weights multiplied by {}", p.scale), "no factor");
    if (l.router.bias) return refuse("a bias of the router", "none");
    return use(r_.select_bias, l.select_bias, "bias that chooses experts");
  }

  Status check_feed_forward(const Layer& l) const {
    const ActivationParams& a = l.activation;
    if (!r_.index && a.kind != ActKind::kSilu) return refuse("another activation than silu", "silu");
    if (r_.index && (a.kind != ActKind::kSwigluOai || a.alpha != 1.702f || a.limit != 7.0f))
      return refuse("another activation than swiglu_oai with 1.702 and 7", "that one");
    for (const Mlp* m : {&l.mlp, &l.shared}) {
      const bool bias = m->gate.bias || m->up.bias || m->down.bias;
      if (l.moe && bias) return refuse("experts with biases", "none");
      MI_TRY_VOID(use(*m ? r_.mlp_bias : Use::kMay, bias, "bias of the MLP"));
    }
    MI_TRY_VOID(use(r_.index && l.moe ? Use::kMust : Use::kNo, l.index.dim != 0, "block index of a layer"));
    if (!l.moe) return {};
    MI_TRY_VOID(check_router(l));
    MI_TRY_VOID(use(r_.shared == Shared::kNone ? Use::kNo : r_.has_shared, bool(l.shared), "shared expert"));
    MI_TRY_VOID(use(r_.shared_gate ? Use::kMust : Use::kNo, l.shared_gate, "gate of the shared expert"));
    if (r_.shared == Shared::kCount && l.shared && width(l.shared) % width(l.mlp) != 0)
      return refuse(fmt::format("a shared expert of {}", width(l.shared)),
                    fmt::format("a multiple of the experts' {}", width(l.mlp)));
    return {};
  }

  // One set of keys describes all layers.
  Status check_alike(const Layer& l) const {
    const Layer& f = first();
    AttentionParams a = l.attention, b = f.attention;
    a.window = b.window = a.select_block = b.select_block = 0;
    if (!(a == b) || !(l.rope == f.rope) || l.eps != f.eps || l.residual_scale != f.residual_scale ||
        l.qk_norm != f.qk_norm)
      return refuse("layers that differ in attention", "one kind");
    if (l.moe &&
        (!(l.route == last().route) || width(l.mlp) != width(last().mlp) || bool(l.shared) != bool(last().shared) ||
         (l.shared && width(l.shared) != width(last().shared)) || !(l.index == last().index)))
      return refuse("layers that differ in their experts", "one kind");
    if (!l.moe && !f.moe && width(l.mlp) != width(f.mlp)) return refuse("dense layers of different width", "one width");
    return {};
  }

  Status check_ends() const {
    if (ends_.eps != first().eps) return refuse("norms of different eps", "one eps");
    if (r_.scales) return {};
    if (ends_.embed_scale != 1 || ends_.logits_scale != 1 || first().residual_scale != 1)
      return refuse("embeddings, residuals or logits multiplied by a factor", "none");
    return {};
  }

  Status check_kinds() {
    int64_t dense = 0;
    for (const Layer* l : layers_) dense += !l->moe;
    const int64_t n = g_.info.layers;
    for (int64_t i = 0; i < n; ++i)
      if (layers_[size_t(i)]->moe == (i < dense))
        return refuse(fmt::format("the dense layers {} among the others", dense), "them first");
    if (r_.layers == Layers::kDense && dense != n) return refuse("layers with experts", "none");
    if (r_.layers == Layers::kMoe && dense != 0)
      return refuse(fmt::format("{} dense layers", dense), "experts in every layer");
    if (r_.layers != Layers::kDense && dense == n) return refuse("no layer with experts", "some");
    leading_dense_ = dense;
    return {};
  }

  Status rope() {
    std::vector<float> f;
    for (int32_t i = 0; i < g_.info.layers; ++i) {
      const std::vector<float> here = to_f32_vector(m_.weight(ir::full_name(layers_[size_t(i)]->inv_freq->name, i)));
      if (i == 0) f = here;
      if (here != f) return refuse("layers with different rotations", "one");
    }
    if (fit_rope(f, &rope_base_, &rope_factor_)) return {};
    if (!r_.rope_factors)
      return refuse("rotations that follow no plain base (scaled as in yarn or llama3)", "a base and one factor");
    // Divisors of the plain frequencies carry the rest; the fastest ones are as a rule unscaled and tell the base.
    const double n = double(f.size());
    rope_base_ = std::pow(double(f[1]) / double(f[0]), -n);
    const double round = std::round(rope_base_);
    if (std::fabs(rope_base_ - round) < 1e-4 * round) rope_base_ = round;
    for (size_t i = 0; i < f.size(); ++i)
      rope_divisors_.push_back(float(std::pow(rope_base_, -double(i) / n) / double(f[i])));
    return {};
  }

  static int64_t width(const Mlp& m) { return m.down.weight->shape.back(); }
  static uint32_t u32(int64_t v) { return uint32_t(v); }

  void put_keys() {
    const Layer &f = first(), &l = last();
    const ir::ModelInfo& info = g_.info;
    model::GgufKeys& k = plan_.keys;
    k.put(key("block_count"), u32(info.layers));
    k.put(key("context_length"), u32(info.max_positions));
    k.put(key("embedding_length"), u32(info.hidden));
    k.put(key("feed_forward_length"), u32(width(f.mlp)));
    k.put(key("vocab_size"), u32(info.vocab));
    k.put(key("attention.head_count"), u32(f.attention.heads));
    k.put(key("attention.head_count_kv"), u32(f.attention.kv_heads));
    k.put(key("attention.key_length"), u32(f.attention.k_dim));
    k.put(key("attention.value_length"), u32(f.attention.v_dim));
    k.put(key("attention.layer_norm_rms_epsilon"), f.eps);
    k.put(key("rope.dimension_count"), u32(f.rope.rotary_dim));
    k.put(key("rope.freq_base"), float(rope_base_));
    if (rope_factor_ != 1) {
      k.put(key("rope.scaling.type"), "linear");
      k.put(key("rope.scaling.factor"), float(rope_factor_));
    }
    if (r_.scales) {
      k.put(key("embedding_scale"), ends_.embed_scale);
      k.put(key("residual_scale"), f.residual_scale);
      k.put(key("logit_scale"), 1 / ends_.logits_scale);  // logits are divided by it
      k.put(key("attention.scale"), f.attention.scale);
    }
    if (!l.moe) return;
    k.put(key("expert_count"), u32(l.route.experts));
    k.put(key("expert_used_count"), u32(l.route.k));
    if (r_.expert_width_key) k.put(key("expert_feed_forward_length"), u32(width(l.mlp)));
    if (r_.shared == Shared::kCount)
      k.put(key("expert_shared_count"), u32(l.shared ? width(l.shared) / width(l.mlp) : 0));
    if (r_.shared == Shared::kWidth && l.shared) k.put(key("expert_shared_feed_forward_length"), u32(width(l.shared)));
    if (r_.layers == Layers::kDenseThenMoe) k.put(key("leading_dense_block_count"), u32(leading_dense_));
    if (r_.moe_step) k.put(key("interleave_moe_layer_step"), uint32_t(1));
    if (r_.router == Router::kByKeys)
      k.put(key("expert_gating_func"), uint32_t(l.route.score == RouteScore::kSigmoid ? 2 : 1));
    if (r_.route_keys) {
      k.put(key("expert_weights_norm"), l.route.renorm);
      k.put(key("expert_weights_scale"), l.route.scale);
    }
    if (r_.index) {
      k.put(key("attention.indexer.head_count"), u32(l.index.heads));
      k.put(key("attention.indexer.key_length"), u32(l.index.dim));
      k.put(key("attention.indexer.top_k"), u32(l.index.topk));
      k.put(key("attention.indexer.block_size"), u32(l.index.block));
      k.put(key("attention.indexer.local_blocks"), u32(l.index.local));
    }
  }

  FileTensor& add(Weight w, int32_t layer) {
    FileTensor t;
    t.name = model::gguf_tensor_name(names_, w->name);
    MI_CHECK(!t.name.empty(), "GGUF has no name for {}", w->name);
    if (layer >= 0) t.name = fmt::format("blk.{}.{}", layer, t.name);
    t.shape = w->shape;
    t.weight = ir::full_name(w->name, layer);
    t.format = w->format;
    t.group = w->group;
    switch (w->mark) {
      case ir::Mark::kNorm:
      case ir::Mark::kRouter:
      case ir::Mark::kSharedGate:
      case ir::Mark::kIndex:
        t.keep_f32 = true;
        break;
      default:
        t.keep_f32 = t.shape.size() == 1;
    }
    plan_.tensors.push_back(std::move(t));
    return plan_.tensors.back();
  }
  void add_norm(Weight w, int32_t layer, bool plus_one) {
    if (w) add(w, layer).add_one = plus_one;
  }

  void add_top() {
    add(ends_.embed, -1);
    add_norm(ends_.final_norm, -1, ends_.plus_one);
    const bool tied = ends_.head->name == ends_.embed->name;
    if (!tied || !r_.tied) add(ends_.head, -1).name = "output.weight";
    if (tied && !r_.tied)
      plan_.notes.push_back(fmt::format(
          "the head is the embedding; {} wants a matrix of its own, so it is in the file twice", names_.arch));
    if (!rope_divisors_.empty()) {
      FileTensor t;
      t.name = "rope_freqs.weight";
      t.shape = {int64_t(rope_divisors_.size())};
      t.numbers = rope_divisors_;
      t.keep_f32 = true;
      plan_.tensors.push_back(std::move(t));
    }
  }

  void add_layer(int32_t i) {
    const Layer& l = *layers_[size_t(i)];
    const auto matrix = [&](const Matrix& m, int64_t pair_heads = 0) {
      add(m.weight, i).pair_heads = pair_heads;
      if (m.bias) add(m.bias, i).pair_heads = pair_heads;
    };
    const auto norm = [&](Weight w) { add_norm(w, i, l.plus_one); };
    const auto mlp = [&](const Mlp& m) {
      matrix(m.gate);
      matrix(m.up);
      matrix(m.down);
    };
    const bool reorder = names_.pairs && !l.rope.interleaved;
    norm(l.attn_norm);
    matrix(l.q, reorder ? l.attention.heads : 0);
    matrix(l.k, reorder ? l.attention.kv_heads : 0);
    matrix(l.v);
    matrix(l.o);
    norm(l.q_norm);
    norm(l.k_norm);
    if (l.index.dim != 0) {
      add(l.index_q, i);
      add(l.index_k, i);
      norm(l.index_q_norm);
      norm(l.index_k_norm);
    }
    norm(l.mlp_norm);
    if (!l.moe) return mlp(l.mlp);
    matrix(l.router);
    if (l.select_bias) add(l.select_bias, i);
    mlp(l.mlp);
    if (l.shared) mlp(l.shared);
    if (l.shared_gate) add(l.shared_gate, i).shape = {g_.info.hidden};
  }

  const ir::MirDir& m_;
  const ir::Graph& g_;
  const Rule& r_;
  const model::GgufArch& names_;
  FilePlan plan_;
  Ends ends_;
  std::map<const ir::Block*, Layer> kinds_;
  std::vector<const Layer*> layers_;
  int64_t leading_dense_ = 0;
  double rope_base_ = 0, rope_factor_ = 1;
  std::vector<float> rope_divisors_;
};

}  // namespace

bool fit_rope(const std::vector<float>& f, double* base, double* factor) {
  const size_t n = f.size();
  if (n == 0 || !(f[0] > 0)) return false;
  *factor = near(f[0], 1) ? 1 : 1 / double(f[0]);
  if (std::fabs(*factor - std::round(*factor)) < 1e-5) *factor = std::round(*factor);
  *base = 10000;
  if (n == 1) return true;
  // The slowest frequency tells the base best; a base is a round number as a rule.
  const double exact = std::pow(double(f[n - 1]) * *factor, -double(n) / double(n - 1));
  const double step = std::pow(10, std::floor(std::log10(exact)) - 5);
  for (const double b : {std::round(exact / step) * step, std::round(exact), exact}) {
    bool all = std::isfinite(b) && b > 0;
    for (size_t i = 0; i < n && all; ++i) all = near(f[i], std::pow(b, -double(i) / double(n)) / *factor);
    if (!all) continue;
    *base = b;
    return true;
  }
  return false;
}

std::vector<std::string> known_families() {
  std::vector<std::string> names;
  for (const Rule& r : kRules) names.push_back(r.family);
  return names;
}

Result<FilePlan> plan_file(const ir::MirDir& m) {
  for (const Rule& r : kRules)
    if (m.graph.info.family == r.family) return GgufPlanner(m, r).run();
  return bad_input("{}: family '{}' cannot be written as GGUF; those that can are {}", m.dir.string(),
                   m.graph.info.family, fmt::join(known_families(), ", "));
}

}  // namespace mi::tools::gguf
