#pragma once
// For tests: a small valid engine that has every kind of tensor (plain, packed int8, int4 and float, experts), a fused
// MoE layer with a residual, and a block-index attention layer. Numbers are seeded noise.

#include "artifact/layout.h"
#include "artifact/types.h"
#include "artifact/writer.h"
#include "base/util.h"

namespace mi::artifact::testing {

class TinyEngine {
 public:
  static constexpr int64_t kVocab = 50, kHidden = 24, kHeads = 4, kKvHeads = 2, kDim = 8, kExperts = 6, kTopK = 2,
                           kInner = 20, kBlock = 4, kBlocks = 3;

  // int4: some of the matrices have 4 bits, else 8. stored: the inputs of o and down have stored scales, which saturate.
  explicit TinyEngine(bool int4 = true, bool stored = false) : int4_(int4), stored_(stored) {
    m_.tool_version = "test";
    m_.model.name = "tiny";
    m_.model.family = "test";
    m_.model.model_type = "test";
    m_.model.vocab = kVocab;
    m_.model.hidden = kHidden;
    m_.model.layers = 2;
    m_.model.max_positions = 256;
    m_.model.eos_ids = {2};
    m_.model.bos_id = 1;
    m_.model.total_params = 1000;
    m_.model.active_params = 500;
    m_.model.max_k = kTopK;
    m_.model.precision = "w8a8";
    m_.passes = {{"fuse_qkv", false, true, 0.25, 40, 36}};
    m_.fallbacks = {{"layers 1: attn.o.weight", "float", "why", "fix"}};
    m_.options = {{"opt_level", "O2"}};
    m_.caches = {{kKvHeads, kDim, kDim, 0, 0}, {kKvHeads, kDim, kDim, kDim, 0}};
    m_.memory.kv_bytes_per_token_bf16 = 2 * (2 * kKvHeads * 2 * kDim + kDim);
    program();
    place();
  }

  // With offsets of weights unset; valid once written.
  Manifest& manifest() { return m_; }

  // Writes weights.bin and engine.json into dir.
  Result<Manifest> write(const Path& dir, int64_t segment_bytes = int64_t(256) << 20) {
    MI_TRY(auto w, ArtifactWriter::create(dir, segment_bytes));
    for (WeightTensor& t : m_.weights) {
      MI_TRY_VOID(w.begin_tensor(t.bytes));
      MI_TRY(t.offset, w.align());
      MI_TRY_VOID(noise(w, t, t.bytes));
      if (t.packing != Packing::kPackedI8 && t.packing != Packing::kPackedI4) continue;
      MI_TRY(t.scale_offset, w.align());
      MI_TRY_VOID(noise(w, {}, scale_bytes(t)));
      if (t.packing != Packing::kPackedI8) continue;
      MI_TRY(t.colsum_offset, w.align());
      MI_TRY_VOID(noise(w, {}, t.experts * t.n_pad * 4));
    }
    MI_TRY_VOID(w.finish(m_));
    return m_;
  }

 private:
  static constexpr ValueType f32(int64_t cols) { return {Rows::kToken, cols, Elem::kF32}; }
  static constexpr ValueType q8(int64_t cols) { return {Rows::kToken, cols, Elem::kQ8}; }
  static constexpr Operand kState{-1, 0, {Rows::kToken, 0, Elem::kState}};

  Status noise(ArtifactWriter& w, const WeightTensor& t, int64_t bytes) {
    std::vector<float> values(size_t(bytes / 4));  // int8 and bf16 tensors get bytes of the same floats
    for (size_t i = 0; i < values.size(); ++i) values[i] = random_unit(seed_of(7, t.name), i) * 0.1f;
    return w.write(std::as_bytes(std::span(values)));
  }
  Operand buffer(const std::string& name, ValueType t) {
    Buffer b;
    b.name = name;
    b.type = t;
    b.row_stride = row_bytes(t);
    b.first_instr = b.last_instr = int32_t(m_.program.size());
    m_.buffers.push_back(b);
    return {int32_t(m_.buffers.size()) - 1, 0, t};
  }
  int32_t tensor(const std::string& name, Packing p, DType d, int64_t experts, int64_t n, int64_t k) {
    WeightTensor t;
    t.name = name;
    t.packing = p;
    t.dtype = d;
    t.experts = experts;
    t.n = n;
    t.k = k;
    const bool plain = p == Packing::kPlain;
    t.n_pad = plain && k > 1 ? n : round_up(n, kPackN);
    t.k_pad = plain ? k : round_up(k, kPackK);
    t.expert_stride = plain ? t.n_pad * t.k_pad * int64_t(dtype_bytes(d)) : packed_bytes(p, t.n_pad * t.k_pad);
    t.bytes = experts * t.expert_stride;
    m_.weights.push_back(t);
    return int32_t(m_.weights.size()) - 1;
  }
  int32_t vec(const std::string& name, int64_t n) { return tensor(name, Packing::kPlain, DType::kF32, 1, n, 1); }
  int32_t i4(const std::string& name, int64_t n, int64_t k, DType scales, int64_t experts = 1) {
    if (!int4_) return i8(name, n, k, experts);
    const int32_t t = tensor(name, Packing::kPackedI4, DType::kU8, experts, n, k);
    m_.weights[size_t(t)].group = 32;
    m_.weights[size_t(t)].scale_dtype = scales;
    return t;
  }
  int32_t i8(const std::string& name, int64_t n, int64_t k, int64_t experts = 1) {
    return tensor(name, Packing::kPackedI8, DType::kI8, experts, n, k);
  }

  Operand emit(Op op, int32_t layer, std::vector<Operand> in, Operand out, std::vector<InstrWeight> weights,
               OpParams params, int32_t residual = -1, int32_t scratch = -1) {
    for (const Operand& o : in)
      if (o.buffer >= 0) m_.buffers[size_t(o.buffer)].last_instr = int32_t(m_.program.size());
    Instr i;
    i.op = op;
    i.layer = layer;
    i.in = std::move(in);
    i.out = {out};
    i.residual = residual;
    i.scratch = scratch;
    i.weights = std::move(weights);
    i.params = params;
    i.name = out.buffer < 0 ? "state" : m_.buffers[size_t(out.buffer)].name;
    m_.program.push_back(i);
    return out;
  }
  static Operand part(Operand o, int64_t col, int64_t cols) {
    o.col += col;
    o.type.cols = cols;
    return o;
  }

  Operand attention(int32_t layer, Operand x, bool indexed) {
    const std::string p = "layers." + std::to_string(layer) + ".";
    const Operand n = emit(Op::kRmsNorm, layer, {x}, buffer(p + "norm", q8(kHidden)),
                           {{Role::kWeight, vec(p + "norm.weight", kHidden)}}, NormParams{});
    const int64_t q_cols = kHeads * kDim, kv_cols = kKvHeads * kDim;
    const Operand qkv = emit(Op::kLinear, layer, {n}, buffer(p + "qkv", f32(q_cols + 2 * kv_cols)),
                             {{Role::kWeight, i8(p + "qkv.weight", q_cols + 2 * kv_cols, kHidden)}}, LinearParams{});
    const int32_t inv_freq = vec(p + "inv_freq", kDim / 2);
    const Operand q = emit(Op::kRope, layer, {part(qkv, 0, q_cols)}, buffer(p + "q", f32(q_cols)),
                           {{Role::kInvFreq, inv_freq}}, RopeParams{kHeads, kDim, kDim, false, 1});
    const Operand k = emit(Op::kRope, layer, {part(qkv, q_cols, kv_cols)}, buffer(p + "k", f32(kv_cols)),
                           {{Role::kInvFreq, inv_freq}}, RopeParams{kKvHeads, kDim, kDim, false, 1});
    emit(Op::kKvAppend, layer, {k, part(qkv, q_cols + kv_cols, kv_cols)}, kState, {},
         KvAppendParams{kKvHeads, kDim, kDim});
    std::vector<Operand> in = {q, kState};
    if (indexed) {
      emit(Op::kIndexAppend, layer, {part(k, 0, kDim)}, kState, {}, IndexAppendParams{kDim});
      in.push_back(emit(Op::kIndexSelect, layer, {part(q, 0, kKvHeads * kDim), kState},
                        buffer(p + "selection", {Rows::kToken, kKvHeads * kBlocks, Elem::kI32}), {},
                        IndexSelectParams{kKvHeads, kDim, kBlock, kBlocks, 1}));
    }
    const Operand o = emit(Op::kAttention, layer, in, buffer(p + "o", f32(q_cols)), {},
                           AttentionParams{kHeads, kKvHeads, kDim, kDim, 0.35f, 0, 0, indexed ? kBlock : 0});
    std::vector<InstrWeight> scale;
    if (stored_) scale = {{Role::kInScale, vec(p + "act.o.scale", 1)}};
    const Operand oq = emit(Op::kQuantize, layer, {o}, buffer(p + "oq", q8(q_cols)), scale, QuantizeParams{stored_});
    return emit(Op::kLinear, layer, {oq, x}, buffer(p + "x_attn", f32(kHidden)),
                {{Role::kWeight, i4(p + "o.weight", kHidden, q_cols, DType::kBF16)}}, LinearParams{}, 1);
  }
  Operand experts(int32_t layer, Operand x) {
    const std::string p = "layers." + std::to_string(layer) + ".";
    const Operand n = buffer(p + "norm2", f32(kHidden)), nq = buffer(p + "norm2q", q8(kHidden));
    emit(Op::kRmsNorm, layer, {x}, n, {{Role::kWeight, vec(p + "norm2.weight", kHidden)}}, NormParams{});
    m_.program.back().out.push_back(nq);
    const Operand logits =
        emit(Op::kLinear, layer, {n}, buffer(p + "logits", f32(kExperts)),
             {{Role::kWeight, tensor(p + "router.weight", Packing::kPackedF32, DType::kF32, 1, kExperts, kHidden)}},
             LinearParams{});
    RouteParams r;
    r.experts = kExperts;
    r.k = kTopK;
    const Operand route =
        emit(Op::kRoute, layer, {logits}, buffer(p + "route", {Rows::kToken, kTopK, Elem::kRoute}), {}, r);
    const int32_t scratch = buffer(p + "scratch", f32(512)).buffer;
    const Operand y =
        emit(Op::kGroupedExperts, layer, {nq, route, x}, buffer(p + "x_moe", f32(kHidden)),
             {{Role::kGate, i8(p + "gate.weight", kInner, kHidden, kExperts)},
              {Role::kUp, i8(p + "up.weight", kInner, kHidden, kExperts)},
              {Role::kDown, i4(p + "down.weight", kHidden, kInner, DType::kF32, kExperts)},
              {Role::kDownBias, tensor(p + "down.bias", Packing::kPlain, DType::kF32, kExperts, kHidden, 1)}},
             GroupedExpertsParams{}, 2, scratch);
    m_.program.back().layer_output = true;
    if (stored_) {
      m_.program.back().weights.push_back({Role::kInScale, vec(p + "act.h.scale", 1)});
      std::get<GroupedExpertsParams>(m_.program.back().params).saturate = true;
    }
    return y;
  }
  void program() {
    Operand x = emit(Op::kEmbed, -1, {}, buffer("x", f32(kHidden)),
                     {{Role::kWeight, tensor("embed.weight", Packing::kPlain, DType::kBF16, 1, kVocab, kHidden)}},
                     EmbedParams{});
    m_.program.back().layer_output = true;
    for (int32_t l = 0; l < 2; ++l) x = experts(l, attention(l, x, l == 1));
    const Operand n = emit(Op::kRmsNorm, -1, {x}, buffer("final", f32(kHidden)),
                           {{Role::kWeight, vec("norm.weight", kHidden)}}, NormParams{});
    const Operand rows =
        emit(Op::kSelectRows, -1, {n}, buffer("rows", {Rows::kLogit, kHidden, Elem::kF32}), {}, SelectRowsParams{});
    emit(Op::kLinear, -1, {rows}, buffer("out", {Rows::kLogit, kVocab, Elem::kF32}),
         {{Role::kWeight, tensor("lm_head.weight", Packing::kPackedBF16, DType::kBF16, 1, kVocab, kHidden)}},
         LinearParams{});
  }
  // A plan without sharing.
  void place() {
    int64_t at = 0;
    for (Buffer& b : m_.buffers) {
      b.offset_per_token = at;
      at += b.row_stride * b.rows_per_token;
    }
    m_.memory.activation_bytes_per_token = at;
  }

  const bool int4_, stored_;
  Manifest m_;
};

}  // namespace mi::artifact::testing
