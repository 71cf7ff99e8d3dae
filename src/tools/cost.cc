#include "tools/cost.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"

namespace mi::tools {
namespace {

using artifact::Instr;
using artifact::Manifest;
using artifact::Packing;
using artifact::WeightTensor;

const WeightTensor& tensor(const Manifest& m, const artifact::InstrWeight& w) { return m.weights[size_t(w.tensor)]; }
bool is_matrix(const WeightTensor& t) { return t.packing != Packing::kPlain; }

// One expert's part of a tensor (a tensor without experts is one), padding left out.
double expert_bytes(const WeightTensor& t) {
  if (!is_matrix(t)) return double(t.n * t.k) * double(dtype_bytes(t.dtype));
  const double true_part = double(t.n * t.k) / double(t.n_pad * t.k_pad);
  const double scales = t.scale_offset > 0 ? 4.0 * double(t.n) : 0, sums = t.colsum_offset > 0 ? 4.0 * double(t.n) : 0;
  return double(t.expert_stride) * true_part + scales + sums;
}

double read_bytes(const Manifest& m, const Instr& i, double tokens, double experts) {
  double sum = 0;
  for (const artifact::InstrWeight& w : i.weights) {
    const WeightTensor& t = tensor(m, w);
    if (i.op == Op::kEmbed && w.role == Role::kWeight)
      sum += tokens * double(t.k) * double(dtype_bytes(t.dtype));  // rows of a table
    else
      sum += expert_bytes(t) * (t.experts > 1 ? experts : 1);
  }
  return sum;
}

// Operations of one row (of a pair, for experts) in the instruction's packed matrices.
Cost matrix_ops(const Manifest& m, const Instr& i) {
  Cost c;
  for (const artifact::InstrWeight& w : i.weights) {
    const WeightTensor& t = tensor(m, w);
    if (is_matrix(t)) (is_float(t.dtype) ? c.float_ops : c.int8_ops) += 2.0 * double(t.n * t.k);
  }
  return c;
}

void add_times(Cost* to, const Cost& ops, double rows) {
  to->int8_ops += ops.int8_ops * rows;
  to->float_ops += ops.float_ops * rows;
}

int64_t seen(int64_t position, int64_t window, int64_t selected) {
  int64_t n = position + 1;
  if (window > 0) n = std::min(n, window);
  if (selected > 0) n = std::min(n, selected);
  return n;
}

// Bytes of one position in a layer's cache.
double key_value_bytes(const artifact::LayerCache& l, kernels::KvKind kv) {
  kernels::KvCache c;
  c.kind = kv;
  c.kv_heads = l.kv_heads;
  c.k_dim = l.k_dim;
  c.v_dim = l.v_dim;
  return double(c.page_bytes()) / double(kernels::kPageTokens);
}
double index_bytes(const artifact::LayerCache& l, kernels::KvKind kv) {
  kernels::KvCache c;
  c.kind = kv;
  c.index_dim = l.index_dim;
  return double(c.index_bytes()) / double(kernels::kPageTokens);
}

Cost attention_cost(const Manifest& m, const Instr& i, const StepShape& s, kernels::KvKind kv) {
  const AttentionParams& p = std::get<AttentionParams>(i.params);
  const int64_t topk = i.in.size() > 2 ? i.in[2].type.cols / p.kv_heads : 0, selected = topk * p.select_block;
  const double per_key = double(p.heads) * 2.0 * double(p.k_dim + p.v_dim);
  Cost c;
  double& ops = kv == kernels::KvKind::kBF16 ? c.bf16_ops : c.float_ops;
  double keys = 0;
  for (const StepShape::Part& part : s.parts) {
    const int64_t end = part.start + part.tokens;
    const int64_t first = p.window > 0 ? std::max<int64_t>(0, part.start - p.window + 1) : 0;
    keys += double(selected > 0 ? std::min(end - first, part.tokens * selected) : end - first);
    for (int64_t t = part.start; t < end; ++t) ops += per_key * double(seen(t, p.window, selected));
  }
  c.kv_bytes = keys * key_value_bytes(m.caches[size_t(i.layer)], kv);
  return c;
}

// A row whose blocks are all selected needs no scores.
Cost index_select_cost(const Manifest& m, const Instr& i, const StepShape& s, kernels::KvKind kv) {
  const IndexSelectParams& p = std::get<IndexSelectParams>(i.params);
  Cost c;
  for (const StepShape::Part& part : s.parts) {
    const int64_t end = part.start + part.tokens;
    const auto scored = [&](int64_t t) { return t / p.block + 1 > p.topk; };
    if (scored(end - 1)) c.kv_bytes += double(end) * index_bytes(m.caches[size_t(i.layer)], kv);
    for (int64_t t = part.start; t < end; ++t)
      if (scored(t)) c.float_ops += 2.0 * double(p.heads * p.dim * (t + 1));
  }
  return c;
}

// Operations per element of the result for what is neither a product nor attention.
double element_ops(const Instr& i) {
  switch (i.op) {
    case Op::kRmsNorm:
      return 4;  // square, add, times 1/rms, times weight
    case Op::kQuantize:
      return 3;  // maximum, times, round
    case Op::kRope:
      return 3;  // two products, an add
    case Op::kClamp:
      return 2;
    case Op::kAdd:
    case Op::kScale:
      return 1;
    case Op::kActivation:  // exponential, add, quotient, product; maximum, times, round
      return i.out[0].type.elem == Elem::kQ8 ? 7 : 4;
    case Op::kSigmoidMul:
      return 4;
    default:
      return 0;  // products and the rest: instr_cost()
  }
}

}  // namespace

int64_t StepShape::tokens() const {
  int64_t n = 0;
  for (const Part& p : parts) n += p.tokens;
  return n;
}
int64_t StepShape::logits() const {
  int64_t n = 0;
  for (const Part& p : parts) n += p.logits;
  return n;
}

StepShape shape_of(const exec::Batch& b) {
  StepShape s;
  for (const exec::Chunk& c : b.chunks) {
    const int64_t n = int64_t(c.tokens.size());
    s.parts.push_back({c.start, n, n - c.logits_from});
  }
  return s;
}

Cost& Cost::operator+=(const Cost& o) {
  weight_bytes += o.weight_bytes;
  kv_bytes += o.kv_bytes;
  int8_ops += o.int8_ops;
  float_ops += o.float_ops;
  bf16_ops += o.bf16_ops;
  return *this;
}

ExpertChoice expert_choice(const Manifest& m, const Instr& i) {
  if (i.op != Op::kExpertLinear && i.op != Op::kGroupedExperts) return {};
  for (const artifact::InstrWeight& w : i.weights)
    if (is_matrix(tensor(m, w))) return {tensor(m, w).experts, i.in[1].type.cols};
  MI_CHECK(false, "{} has no matrix", i.name);
}

Cost instr_cost(const Manifest& m, const Instr& i, const StepShape& s, double experts, kernels::KvKind kv) {
  const double tokens = double(s.tokens()), logits = double(s.logits());
  const auto rows = [&](const artifact::Operand& o) {
    if (o.type.rows == Rows::kLogit) return logits;
    return o.type.rows == Rows::kPair ? tokens * double(m.buffers[size_t(o.buffer)].rows_per_token) : tokens;
  };
  if (!i.out.empty() && i.out[0].type.rows == Rows::kLogit && logits == 0)
    return {};  // such an instruction is left out
  Cost c;
  if (i.op == Op::kAttention)
    c = attention_cost(m, i, s, kv);
  else if (i.op == Op::kIndexSelect)
    c = index_select_cost(m, i, s, kv);
  c.weight_bytes = read_bytes(m, i, tokens, experts);

  const artifact::Operand& out = i.out[0];
  const bool chosen = i.op == Op::kExpertLinear || i.op == Op::kGroupedExperts || i.op == Op::kExpertCombine;
  const double k = chosen ? double(i.in[1].type.cols) : 1;
  const double elements =
      out.type.elem == Elem::kState || out.type.elem == Elem::kRoute ? 0 : rows(out) * double(out.type.cols);
  c.float_ops += elements * element_ops(i);
  switch (i.op) {
    case Op::kLinear:
      add_times(&c, matrix_ops(m, i), rows(out));
      break;
    case Op::kExpertLinear:
      add_times(&c, matrix_ops(m, i), tokens * k);
      break;
    case Op::kKvAppend:
      if (std::get<KvAppendParams>(i.params).rotary_dim > 0) c.float_ops += 3 * tokens * double(i.in[0].type.cols);
      break;
    case Op::kRoute:
      c.float_ops += tokens * 3 * double(i.in[0].type.cols);
      break;  // exponential, sum, comparison
    case Op::kExpertCombine:
      c.float_ops += tokens * k * 2 * double(out.type.cols);
      break;
    case Op::kGroupedExperts: {
      add_times(&c, matrix_ops(m, i), tokens * k);
      double inner = 0;
      for (const artifact::InstrWeight& w : i.weights)
        if (w.role == Role::kGate) inner = double(tensor(m, w).n);
      c.float_ops += tokens * k * (4 * inner + 2 * double(out.type.cols));  // activation, combination
      break;
    }
    default:
      break;
  }
  if (i.residual >= 0) c.float_ops += elements;
  return c;
}

double expected_experts(int64_t experts, int64_t k, double tokens) {
  if (experts <= 0) return 0;
  return double(experts) * (1 - std::pow(1 - double(k) / double(experts), tokens));
}

double token_ops(const Manifest& m, bool with_head) {
  double sum = 0;
  for (const Instr& i : m.program) {
    if (i.op == Op::kLinear && (with_head || i.out[0].type.rows != Rows::kLogit)) sum += matrix_ops(m, i).ops();
    if (const ExpertChoice e = expert_choice(m, i); e.experts > 0) sum += matrix_ops(m, i).ops() * double(e.k);
  }
  return sum;
}

double step_weight_bytes(const Manifest& m, double streams) {
  double sum = 0;
  for (const Instr& i : m.program) {
    const ExpertChoice e = expert_choice(m, i);
    sum += read_bytes(m, i, streams, expected_experts(e.experts, e.k, streams));
  }
  return sum;
}

bool mostly_int8(const Manifest& m) {
  Cost c;
  for (const Instr& i : m.program) {
    const ExpertChoice e = expert_choice(m, i);
    if (i.op == Op::kLinear && i.out[0].type.rows != Rows::kLogit) c += matrix_ops(m, i);
    if (e.experts > 0) add_times(&c, matrix_ops(m, i), double(e.k));
  }
  return c.int8_ops > c.float_ops;
}

kernels::KvKind kv_kind_of(const std::string& name) {
  if (name == "f32") return kernels::KvKind::kF32;
  if (name == "int8") return kernels::KvKind::kI8;
  MI_CHECK(name == "bf16", "KV type '{}'", name);
  return kernels::KvKind::kBF16;
}

}  // namespace mi::tools
