#pragma once
// For tests: small models with seeded weights as engine directories, written op by op, and the same weights as plain floats
// for the oracle (test_oracle.h). Every op that the executor knows occurs in one of them.

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <map>

#include "artifact/layout.h"
#include "artifact/writer.h"
#include "base/temp_dir.h"
#include "base/util.h"
#include "exec/engine.h"
#include "kernels/gemm/pack.h"
#include "kernels/moe/grouped.h"
#include "tensor/int4.h"

namespace mi::exec::testing {

using artifact::Instr;
using artifact::InstrWeight;
using artifact::Operand;
using artifact::Packing;
using artifact::WeightTensor;

struct ModelShape {
  Packing packing = Packing::kPackedF32;   // of the matrices, router and head excepted
  bool fused = false;                      // residual epilogues, two-output norm, grouped experts; else the chain of single ops
  int64_t group = 32;                      // of int4 matrices
  bool moe = true;
  int64_t window = 0;                      // of layer 1
  bool sinks = false, softcap = false, interleaved = false;
  bool index = false;                      // layer 1 attends to blocks chosen by a block index
  float stored_scale = 0;                  // of the int8 inputs of o and down; saturate: rows keep their own up to it
  bool saturate = false;
  bool reordered = false;                  // experts' matrices are not stored in the order of their numbers
  bool extras = false;                     // scale, clamp, biases, shared expert behind a sigmoid gate
  int64_t vocab = 50, hidden = 48, layers = 2, heads = 4, kv_heads = 2, dim = 16, inner = 40, experts = 6, k = 2;
  int64_t block = 8, topk = 3;
};

class TestModel {
 public:
  explicit TestModel(const ModelShape& shape) : s_(shape) {
    m_.tool_version = "test";
    m_.model = {"test", "test", "test", s_.vocab, s_.hidden, s_.layers, 4096, {2}, 1, -1, 100, 100, s_.moe ? s_.k : 1, "fp32"};
    m_.default_kv = "f32";
    program();
    for (const auto& c : m_.caches) m_.memory.kv_bytes_per_token_bf16 += 2 * (c.kv_heads * (c.k_dim + c.v_dim) + c.index_dim);
    plan();
    write();
  }

  const std::filesystem::path& dir() const { return dir_.path(); }
  const artifact::Manifest& manifest() const { return m_; }
  // [experts][n][k], what the engine's numbers stand for.
  const std::vector<float>& values(int32_t tensor) const { return values_[size_t(tensor)]; }

  std::unique_ptr<Engine> load(hw::ThreadPool& pool, LoadOptions o = {}) const {
    auto e = Engine::load(dir(), o, pool);
    MI_CHECK(e.ok(), "{}", e.error().message());
    return std::move(e).value();
  }

 private:
  static ValueType f32(int64_t cols, Rows rows = Rows::kToken) { return {rows, cols, Elem::kF32}; }
  Operand state() const { return {-1, 0, {Rows::kToken, 0, Elem::kState}}; }
  static Operand part(Operand o, int64_t col, int64_t cols) {
    o.col += col;
    o.type.cols = cols;
    return o;
  }

  // ---- weights ----
  int32_t tensor(Packing p, DType d, int64_t experts, int64_t n, int64_t k, float size) {
    WeightTensor t;
    t.name = "w" + std::to_string(m_.weights.size());
    t.packing = p;
    t.dtype = d;
    t.experts = experts;
    t.n = n;
    t.k = k;
    const bool plain = p == Packing::kPlain;
    t.n_pad = plain && k > 1 ? n : artifact::round_up(n, artifact::kPackN);
    t.k_pad = plain ? k : artifact::round_up(k, artifact::kPackK);
    t.expert_stride = plain ? t.n_pad * t.k_pad * int64_t(dtype_bytes(d)) : artifact::packed_bytes(p, t.n_pad * t.k_pad);
    t.bytes = experts * t.expert_stride;
    if (s_.reordered && !plain && experts > 1)
      for (int64_t e = 0; e < experts; ++e) t.expert_slots.push_back(int32_t((e * 5 + 3) % experts));
    if (p == Packing::kPackedI4) {
      t.group = s_.group;
      t.scale_dtype = m_.weights.size() % 2 == 0 ? DType::kF32 : DType::kBF16;
    }
    std::vector<float> v(size_t(experts * n * k));
    for (size_t i = 0; i < v.size(); ++i) v[i] = random_normal(seed_of(3, t.name), i) * size;
    if (d == DType::kBF16)
      for (float& x : v) x = to_f32(to_bf16(x));
    if (d == DType::kI8)      // q * scale of its row
      for (size_t r = 0; r < v.size(); r += size_t(k))
        for (int64_t j = 0; j < k; ++j) v[r + size_t(j)] = std::round(std::max(-3.0f, std::min(3.0f, v[r + size_t(j)] / size)) * 42) * row_scale(size, int64_t(r) / k);
    if (p == Packing::kPackedI4)
      for (size_t i = 0; i < v.size(); ++i) {
        const float scale = group_scale(size, int64_t(i) / k, int64_t(i) % k / t.group);
        v[i] = std::round(std::max(-8.0f, std::min(7.0f, v[i] / scale))) * scale;
      }
    values_.push_back(std::move(v));
    sizes_.push_back(size);
    m_.weights.push_back(t);
    return int32_t(m_.weights.size()) - 1;
  }
  // A bfloat16 number of either sign.
  static float group_scale(float size, int64_t row, int64_t g) {
    return to_f32(to_bf16(size / 3 * (1 + float((row + g) % 3) / 4))) * (row % 2 == 0 ? 1.0f : -1.0f);
  }
  static float row_scale(float size, int64_t row) { return size / 42 * (1 + float(row % 3) / 4); }
  int32_t vec(int64_t n, float size, int64_t experts = 1) { return tensor(Packing::kPlain, DType::kF32, experts, n, 1, size); }
  int32_t matrix(int64_t n, int64_t k, int64_t experts = 1) {
    const DType d = s_.packing == Packing::kPackedI8 ? DType::kI8 : s_.packing == Packing::kPackedI4 ? DType::kU8 : s_.packing == Packing::kPackedBF16 ? DType::kBF16 : DType::kF32;
    return tensor(s_.packing, d, experts, n, k, 1.0f / std::sqrt(float(k)));
  }
  int32_t matrix_f32(int64_t n, int64_t k) { return tensor(Packing::kPackedF32, DType::kF32, 1, n, k, 1.0f / std::sqrt(float(k))); }
  int32_t norm_weight(int64_t n) {
    const int32_t w = vec(n, 0.2f);
    for (float& x : values_[size_t(w)]) x += 1;
    return w;
  }

  // ---- program ----
  Operand buffer(ValueType t, int64_t rows_per_token = 1) {
    artifact::Buffer b;
    b.name = "v" + std::to_string(m_.buffers.size());
    b.type = t;
    b.row_stride = artifact::row_bytes(t);
    b.rows_per_token = rows_per_token;
    b.first_instr = b.last_instr = int32_t(m_.program.size());
    m_.buffers.push_back(b);
    return {int32_t(m_.buffers.size()) - 1, 0, t};
  }
  Operand emit(Op op, std::vector<Operand> in, Operand out, std::vector<InstrWeight> weights, OpParams params, int32_t residual = -1) {
    for (const Operand& o : in)
      if (o.buffer >= 0) m_.buffers[size_t(o.buffer)].last_instr = int32_t(m_.program.size());
    if (out.buffer >= 0) m_.buffers[size_t(out.buffer)].first_instr = m_.buffers[size_t(out.buffer)].last_instr = int32_t(m_.program.size());
    Instr i;
    i.op = op;
    i.layer = layer_;
    i.in = std::move(in);
    i.out = {out};
    i.residual = residual;
    i.weights = std::move(weights);
    i.params = params;
    i.name = out.buffer < 0 ? "state" : m_.buffers[size_t(out.buffer)].name;
    m_.program.push_back(i);
    return out;
  }
  bool takes_q8() const { return s_.packing == Packing::kPackedI8 || s_.packing == Packing::kPackedI4; }
  std::vector<InstrWeight> stored_scale() {
    if (s_.stored_scale == 0) return {};
    const int32_t w = vec(1, 0);
    values_[size_t(w)][0] = s_.stored_scale;
    return {{Role::kInScale, w}};
  }
  Operand quantized(Operand x, bool stored = true) {
    if (!takes_q8()) return x;
    const Operand q = buffer({x.type.rows, x.type.cols, Elem::kQ8}, m_.buffers[size_t(x.buffer)].rows_per_token);
    if (!stored || s_.stored_scale == 0) return emit(Op::kQuantize, {x}, q, {}, QuantizeParams{});
    return emit(Op::kQuantize, {x}, q, stored_scale(), QuantizeParams{s_.saturate});
  }
  Operand linear(Operand x, int32_t w, const Operand* residual = nullptr, int32_t bias = -1, float out_scale = 1) {
    std::vector<InstrWeight> weights = {{Role::kWeight, w}};
    if (bias >= 0) weights.push_back({Role::kBias, bias});
    const Operand y = buffer(f32(m_.weights[size_t(w)].n, x.type.rows));
    if (residual && s_.fused) return emit(Op::kLinear, {x, *residual}, y, weights, LinearParams{out_scale}, 1);
    emit(Op::kLinear, {x}, y, weights, LinearParams{out_scale});
    if (!residual) return y;
    return emit(Op::kAdd, {y, *residual}, buffer(y.type), {}, AddParams{});
  }
  // The norm of x as the next linear wants it, and as floats.
  std::pair<Operand, Operand> norm(Operand x) {
    const std::vector<InstrWeight> w = {{Role::kWeight, norm_weight(s_.hidden)}};
    const NormParams p{1e-5f, false, 1};
    if (!takes_q8() || !s_.fused) {
      const Operand y = emit(Op::kRmsNorm, {x}, buffer(f32(s_.hidden)), w, p);
      return {quantized(y, false), y};
    }
    const Operand y = buffer(f32(s_.hidden)), q = buffer({Rows::kToken, s_.hidden, Elem::kQ8});
    emit(Op::kRmsNorm, {x}, y, w, p);
    m_.program.back().out.push_back(q);
    return {q, y};
  }

  Operand attention(Operand x) {
    const int64_t q_cols = s_.heads * s_.dim, kv_cols = s_.kv_heads * s_.dim, rotary = s_.interleaved ? s_.dim : s_.dim / 2;
    const bool indexed = s_.index && layer_ == 1;
    const auto [n, n_float] = norm(x);
    const int32_t bias = s_.extras ? vec(q_cols + 2 * kv_cols, 0.3f) : -1;
    const Operand qkv = linear(n, matrix(q_cols + 2 * kv_cols, s_.hidden), nullptr, bias);
    const int32_t inv_freq = vec(rotary / 2, 0);
    for (int64_t i = 0; i < rotary / 2; ++i) values_[size_t(inv_freq)][size_t(i)] = float(std::pow(10000.0, -2.0 * double(i) / double(rotary)));
    Operand q = part(qkv, 0, q_cols), k = part(qkv, q_cols, kv_cols), v = part(qkv, q_cols + kv_cols, kv_cols);
    if (s_.extras) v = emit(Op::kClamp, {v}, buffer(f32(kv_cols)), {}, ClampParams{-1.5f, 1.5f});
    q = emit(Op::kRmsNorm, {q}, buffer(f32(q_cols)), {{Role::kWeight, norm_weight(s_.dim)}}, NormParams{1e-6f, true, s_.heads});
    q = emit(Op::kRope, {q}, buffer(f32(q_cols)), {{Role::kInvFreq, inv_freq}}, RopeParams{s_.heads, s_.dim, rotary, s_.interleaved, 1.1f});
    if (s_.fused) {
      emit(Op::kKvAppend, {k, v}, state(), {{Role::kInvFreq, inv_freq}}, KvAppendParams{s_.kv_heads, s_.dim, s_.dim, rotary, s_.interleaved, 1.1f});
    } else {
      k = emit(Op::kRope, {k}, buffer(f32(kv_cols)), {{Role::kInvFreq, inv_freq}}, RopeParams{s_.kv_heads, s_.dim, rotary, s_.interleaved, 1.1f});
      emit(Op::kKvAppend, {k, v}, state(), {}, KvAppendParams{s_.kv_heads, s_.dim, s_.dim});
    }
    std::vector<Operand> in = {q, state()};
    if (indexed) {
      const Operand qi = linear(n, matrix(s_.kv_heads * s_.dim, s_.hidden)), ki = linear(n, matrix(s_.dim, s_.hidden));
      emit(Op::kIndexAppend, {ki}, state(), {}, IndexAppendParams{s_.dim});
      in.push_back(emit(Op::kIndexSelect, {qi, state()}, buffer({Rows::kToken, s_.kv_heads * s_.topk, Elem::kI32}), {},
                        IndexSelectParams{s_.kv_heads, s_.dim, s_.block, s_.topk, 1}));
    }
    AttentionParams p{s_.heads, s_.kv_heads, s_.dim, s_.dim, 0.25f, layer_ == 1 ? s_.window : 0, s_.softcap ? 3.0f : 0, indexed ? s_.block : 0};
    m_.caches.push_back({s_.kv_heads, s_.dim, s_.dim, indexed ? s_.dim : 0, p.window});
    std::vector<InstrWeight> sinks;
    if (s_.sinks) sinks.push_back({Role::kSinks, vec(s_.heads, 1)});
    const Operand o = emit(Op::kAttention, in, buffer(f32(q_cols)), sinks, p);
    return linear(quantized(o), matrix(s_.hidden, q_cols), &x, s_.extras ? vec(s_.hidden, 0.1f) : -1, s_.extras ? 0.5f : 1);
  }

  Operand dense(Operand x) {
    const auto [n, n_float] = norm(x);
    const Operand gate_up = linear(n, matrix(2 * s_.inner, s_.hidden));
    const ActivationParams act{ActKind::kGeluTanh, 0, 0};
    const bool joined = s_.fused && takes_q8() && s_.stored_scale == 0;
    const Operand h = joined ? emit(Op::kActivation, {gate_up}, buffer({Rows::kToken, s_.inner, Elem::kQ8}), {}, act)
                             : quantized(emit(Op::kActivation, {gate_up}, buffer(f32(s_.inner)), {}, act));
    return linear(h, matrix(s_.hidden, s_.inner), &x);
  }

  Operand experts(Operand x) {
    const auto [n, n_float] = norm(x);
    const Operand logits = linear(n_float, matrix_f32(s_.experts, s_.hidden));
    RouteParams r;
    r.experts = s_.experts;
    r.k = s_.k;
    r.score = RouteScore::kSigmoid;
    r.renorm = true;
    r.scale = 1.5f;
    const Operand route = emit(Op::kRoute, {logits}, buffer({Rows::kToken, s_.k, Elem::kRoute}), {{Role::kSelectBias, vec(s_.experts, 0.1f)}}, r);
    const ActivationParams act{s_.extras ? ActKind::kSwigluOai : ActKind::kSilu, 1.702f, s_.extras ? 2.0f : 0};
    const int32_t gate = matrix(s_.inner, s_.hidden, s_.experts), up = matrix(s_.inner, s_.hidden, s_.experts), down = matrix(s_.hidden, s_.inner, s_.experts);
    const int32_t up_bias = vec(s_.inner, 0.2f, s_.experts), down_bias = vec(s_.hidden, 0.2f, s_.experts);
    Operand shared = x;
    if (s_.extras) {       // a shared expert of one matrix, behind a gate
      const Operand g = linear(n_float, matrix_f32(1, s_.hidden));
      const Operand y = linear(n, matrix(s_.hidden, s_.hidden));
      const Operand gated = emit(Op::kSigmoidMul, {y, g}, buffer(f32(s_.hidden)), {}, SigmoidMulParams{});
      const Operand scaled = emit(Op::kScale, {gated}, buffer(f32(s_.hidden)), {}, ScaleParams{0.7f});
      shared = emit(Op::kAdd, {x, scaled}, buffer(f32(s_.hidden)), {}, AddParams{});
    }
    if (s_.fused) {
      const kernels::GemmFormat down_format = takes_q8() ? kernels::GemmFormat::kI8 : s_.packing == Packing::kPackedBF16 ? kernels::GemmFormat::kBF16 : kernels::GemmFormat::kF32;
      const Operand scratch = buffer(f32(kernels::grouped_scratch_bytes_per_token(s_.k, s_.hidden, s_.inner, down_format) / 4));
      const Operand y = emit(Op::kGroupedExperts, {n, route, shared}, buffer(f32(s_.hidden)),
                             {{Role::kGate, gate}, {Role::kUp, up}, {Role::kUpBias, up_bias}, {Role::kDown, down}, {Role::kDownBias, down_bias}},
                             GroupedExpertsParams{act.kind, act.alpha, act.limit, s_.saturate}, 2);
      for (const InstrWeight& w : stored_scale()) m_.program.back().weights.push_back(w);
      m_.program.back().scratch = scratch.buffer;
      return y;
    }
    const auto pairs = [&](int64_t cols) { return buffer(f32(cols, Rows::kPair), s_.k); };
    const Operand g = emit(Op::kExpertLinear, {n, route}, pairs(s_.inner), {{Role::kWeight, gate}}, ExpertLinearParams{});
    const Operand u = emit(Op::kExpertLinear, {n, route}, pairs(s_.inner), {{Role::kWeight, up}, {Role::kBias, up_bias}}, ExpertLinearParams{});
    const Operand h = emit(Op::kActivation, {g, u}, pairs(s_.inner), {}, act);
    const Operand y = emit(Op::kExpertLinear, {quantized(h), route}, pairs(s_.hidden), {{Role::kWeight, down}, {Role::kBias, down_bias}}, ExpertLinearParams{});
    const Operand sum = emit(Op::kExpertCombine, {y, route}, buffer(f32(s_.hidden)), {}, ExpertCombineParams{});
    return emit(Op::kAdd, {sum, shared}, buffer(f32(s_.hidden)), {}, AddParams{});
  }

  void program() {
    layer_ = -1;
    Operand x = emit(Op::kEmbed, {}, buffer(f32(s_.hidden)), {{Role::kWeight, tensor(Packing::kPlain, DType::kBF16, 1, s_.vocab, s_.hidden, 1)}},
                     EmbedParams{s_.extras ? 1.25f : 1});
    m_.program.back().layer_output = true;
    for (layer_ = 0; layer_ < s_.layers; ++layer_) {
      x = attention(x);
      x = s_.moe ? experts(x) : dense(x);
      m_.program.back().layer_output = true;
    }
    layer_ = -1;
    const Operand rows = emit(Op::kSelectRows, {x}, buffer(f32(s_.hidden, Rows::kLogit)), {}, SelectRowsParams{});
    const Operand n = emit(Op::kRmsNorm, {rows}, buffer(f32(s_.hidden, Rows::kLogit)), {{Role::kWeight, norm_weight(s_.hidden)}}, NormParams{});
    linear(n, matrix_f32(s_.vocab, s_.hidden));
  }

  // First fit in order of birth, so that buffers share memory.
  void plan() {
    int64_t arena = 0;
    const auto bytes = [](const artifact::Buffer& b) { return b.row_stride * b.rows_per_token; };
    for (size_t i = 0; i < m_.buffers.size(); ++i) {
      artifact::Buffer& b = m_.buffers[i];
      for (bool moved = true; moved;) {
        moved = false;
        for (size_t j = 0; j < i; ++j) {
          const artifact::Buffer& o = m_.buffers[j];
          if (o.last_instr < b.first_instr || o.offset_per_token + bytes(o) <= b.offset_per_token || b.offset_per_token + bytes(b) <= o.offset_per_token) continue;
          b.offset_per_token = o.offset_per_token + bytes(o);
          moved = true;
        }
      }
      arena = std::max(arena, b.offset_per_token + bytes(b));
    }
    m_.memory.activation_bytes_per_token = arena;
  }

  // ---- weights.bin ----
  void write() {
    auto w = artifact::ArtifactWriter::create(dir_.path());
    MI_CHECK(w.ok(), "{}", w.error().message());
    for (size_t i = 0; i < m_.weights.size(); ++i) write_tensor(*w, m_.weights[i], values_[i], sizes_[i]);
    const Status s = w->finish(m_);
    MI_CHECK(s.ok(), "{}", s.error().message());
  }
  template <typename T>
  static void put(artifact::ArtifactWriter& w, const std::vector<T>& v) { w.write(std::as_bytes(std::span(v))).value(); }
  void write_tensor(artifact::ArtifactWriter& w, WeightTensor& t, const std::vector<float>& v, float size) {
    w.begin_tensor(t.bytes).value();
    t.offset = w.align().value();
    const int64_t groups = t.packing == Packing::kPackedI4 ? int4_groups(t.k, t.group) : 1;
    std::vector<float> scales(size_t(t.experts * t.n_pad * groups));
    std::vector<int32_t> colsums(size_t(t.experts * t.n_pad));
    std::vector<int64_t> expert_at(static_cast<size_t>(t.experts));
    for (int64_t e = 0; e < t.experts; ++e) expert_at[size_t(artifact::expert_slot(t, e))] = e;
    for (const int64_t e : expert_at) {
      const float* x = v.data() + e * t.n * t.k;
      const size_t count = size_t(t.n * t.k), padded = size_t(t.n_pad * t.k_pad);
      if (t.packing == Packing::kPackedF32) {
        std::vector<float> out(padded);
        kernels::pack_f32(x, t.n, t.k, out.data(), 0);
        put(w, out);
      } else if (t.packing == Packing::kPackedI8) {
        std::vector<int8_t> q(count), out(padded);
        for (int64_t r = 0; r < t.n; ++r) {
          const float scale = row_scale(size, e * t.n + r);
          scales[size_t(e * t.n_pad + r)] = scale;
          for (int64_t j = 0; j < t.k; ++j) q[size_t(r * t.k + j)] = int8_t(std::lround(x[r * t.k + j] / scale));
        }
        kernels::pack_i8(q.data(), t.n, t.k, out.data(), 0);
        kernels::colsum_i8(q.data(), t.n, t.k, colsums.data() + e * t.n_pad);
        put(w, out);
      } else if (t.packing == Packing::kPackedI4) {
        std::vector<uint8_t> rows(size_t(t.n * int4_row_bytes(t.k))), out(padded / 2);
        std::vector<int8_t> q(static_cast<size_t>(t.k));
        for (int64_t r = 0; r < t.n; ++r) {
          for (int64_t j = 0; j < t.k; ++j) q[size_t(j)] = int8_t(std::lround(x[r * t.k + j] / group_scale(size, e * t.n + r, j / t.group)));
          int4_store_row(q.data(), t.k, &rows[size_t(r * int4_row_bytes(t.k))]);
          for (int64_t g = 0; g < groups; ++g) scales[size_t(artifact::expert_slot(t, e) * t.n_pad * groups + kernels::packed_scale_index(r, g, groups))] = group_scale(size, e * t.n + r, g);
        }
        kernels::pack_i4(rows.data(), t.n, t.k, out.data(), 0);
        put(w, out);
      } else if (t.dtype == DType::kBF16) {
        std::vector<uint16_t> bits(count), out(padded);
        for (size_t j = 0; j < count; ++j) bits[j] = to_bf16(x[j]).bits;
        if (t.packing == Packing::kPackedBF16)
          kernels::pack_bf16(bits.data(), t.n, t.k, out.data(), 0);
        else
          out = bits;
        put(w, out);
      } else {
        std::vector<float> out(x, x + count);
        out.resize(padded);
        put(w, out);
      }
    }
    if (t.packing != Packing::kPackedI8 && t.packing != Packing::kPackedI4) return;
    t.scale_offset = w.align().value();
    if (t.scale_dtype == DType::kBF16) {
      std::vector<uint16_t> half;
      for (float v : scales) half.push_back(to_bf16(v).bits);
      put(w, half);
    } else {
      put(w, scales);
    }
    if (t.packing != Packing::kPackedI8) return;
    t.colsum_offset = w.align().value();
    put(w, colsums);
  }

  ModelShape s_;
  TempDir dir_;
  artifact::Manifest m_;
  std::vector<std::vector<float>> values_;
  std::vector<float> sizes_;
  int32_t layer_ = -1;
};

}  // namespace mi::exec::testing
