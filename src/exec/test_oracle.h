#pragma once
// For tests: the slow twin of the executor. Interprets a program for one whole sequence in double, op by op as tensor/op.h
// defines them: no cache, no pages, no batches, no packed weights. (kQ8 values are rounded to their int8 grid.)

#include <algorithm>
#include <numeric>

#include "exec/test_model.h"

namespace mi::exec::testing {

class Oracle {
 public:
  // Logits [tokens][vocab] of every position.
  static std::vector<std::vector<double>> run(const TestModel& model, const std::vector<int32_t>& ids) {
    Oracle o(model, ids);
    for (const Instr& i : model.manifest().program) o.step(i);
    return o.values_[size_t(model.manifest().program.back().out[0].buffer)];
  }

 private:
  using Row = std::vector<double>;
  using Values = std::vector<Row>;

  Oracle(const TestModel& model, const std::vector<int32_t>& ids) : model_(model), ids_(ids), values_(model.manifest().buffers.size()) {}

  Values in(const Operand& o) const {
    Values v;
    for (const Row& r : values_[size_t(o.buffer)]) v.emplace_back(r.begin() + o.col, r.begin() + o.col + o.type.cols);
    return v;
  }
  const std::vector<float>* weight(const Instr& i, Role role) const {
    for (const InstrWeight& w : i.weights)
      if (w.role == role) return &model_.values(w.tensor);
    return nullptr;
  }
  static double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
  static double act(ActKind kind, double alpha, double limit, double g, double u) {
    switch (kind) {
      case ActKind::kSilu: return g * sigmoid(g) * u;
      case ActKind::kGelu: return 0.5 * g * (1 + std::erf(g / std::sqrt(2.0))) * u;
      case ActKind::kGeluTanh: return 0.5 * g * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g))) * u;
      case ActKind::kRelu: return std::max(g, 0.0) * u;
      case ActKind::kSwigluOai:
        if (limit > 0) g = std::min(g, limit), u = std::clamp(u, -limit, limit);
        return (u + 1) * g * sigmoid(alpha * g);
    }
    return 0;
  }
  static Row quantize(const Row& x, double stored, bool saturate) {
    double m = 0;
    for (double v : x) m = std::max(m, std::abs(v));
    Row y;
    if (stored > 0 && (!saturate || m / 127 > stored)) {
      for (double v : x) y.push_back(std::clamp(std::nearbyint(v / stored), -127.0, 127.0) * stored);
      return y;
    }
    for (double v : x) y.push_back(m == 0 ? 0 : std::nearbyint(v * 127 / m) * m / 127);
    return y;
  }
  double stored_scale(const Instr& i) const {
    const auto* s = weight(i, Role::kInScale);
    return s ? (*s)[0] : 0;
  }
  static bool saturates(const Instr& i) {
    const auto* q = std::get_if<QuantizeParams>(&i.params);
    return q && q->saturate;
  }
  // y_n = sum_k w[e][n][k] x_k + b[e][n]
  static Row multiply(const std::vector<float>& w, const std::vector<float>* b, int64_t e, int64_t n, const Row& x) {
    Row y;
    const int64_t k = int64_t(x.size());
    for (int64_t r = 0; r < n; ++r) {
      double sum = 0;
      for (int64_t j = 0; j < k; ++j) sum += double(w[size_t((e * n + r) * k + j)]) * x[size_t(j)];
      y.push_back(sum + (b ? (*b)[size_t(e * n + r)] : 0));
    }
    return y;
  }
  static void add(Row& y, const Row& x) {
    for (size_t j = 0; j < y.size(); ++j) y[j] += x[j];
  }

  void step(const Instr& i) {
    Values out;
    std::visit([&](const auto& p) { op(i, p, out); }, i.params);
    if (i.residual >= 0) {
      const Values r = in(i.in[size_t(i.residual)]);
      for (size_t t = 0; t < out.size(); ++t) add(out[t], r[t]);
    }
    for (const Operand& o : i.out) {
      if (o.buffer < 0) continue;
      Values v = out;
      if (o.type.elem == Elem::kQ8)
        for (Row& r : v) r = quantize(r, stored_scale(i), saturates(i));
      values_[size_t(o.buffer)] = std::move(v);
    }
  }

  void op(const Instr& i, const EmbedParams& p, Values& out) {
    const auto& w = *weight(i, Role::kWeight);
    const size_t n = size_t(i.out[0].type.cols);
    for (int32_t id : ids_) {
      Row r;
      for (size_t j = 0; j < n; ++j) r.push_back(double(w[size_t(id) * n + j]) * p.scale);
      out.push_back(r);
    }
  }
  void op(const Instr& i, const NormParams& p, Values& out) {
    const auto& w = *weight(i, Role::kWeight);
    for (Row& r : out = in(i.in[0])) {
      const size_t n = r.size() / size_t(p.groups);
      for (size_t g = 0; g < r.size(); g += n) {
        double sum = 0;
        for (size_t j = 0; j < n; ++j) sum += r[g + j] * r[g + j];
        for (size_t j = 0; j < n; ++j) r[g + j] = r[g + j] / std::sqrt(sum / double(n) + p.eps) * (w[j] + (p.plus_one ? 1.0 : 0.0));
      }
    }
  }
  void op(const Instr& i, const QuantizeParams&, Values& out) { out = in(i.in[0]); }
  void op(const Instr& i, const LinearParams& p, Values& out) {
    for (const Row& x : in(i.in[0])) {
      out.push_back(multiply(*weight(i, Role::kWeight), weight(i, Role::kBias), 0, i.out[0].type.cols, x));
      for (double& y : out.back()) y *= p.out_scale;
    }
  }
  void op(const Instr& i, const ClampParams& p, Values& out) {
    for (Row& r : out = in(i.in[0]))
      for (double& v : r) v = std::clamp(v, double(p.lo), double(p.hi));
  }
  void op(const Instr& i, const RopeParams& p, Values& out) {
    rotate(p, *weight(i, Role::kInvFreq), out = in(i.in[0]));
  }
  static void rotate(const RopeParams& p, const std::vector<float>& f, Values& out) {
    for (size_t t = 0; t < out.size(); ++t)
      for (int64_t h = 0; h < p.heads; ++h)
        for (int64_t j = 0; j < p.rotary_dim / 2; ++j) {
          double& a = out[t][size_t(h * p.head_dim + (p.interleaved ? 2 * j : j))];
          double& b = out[t][size_t(h * p.head_dim + (p.interleaved ? 2 * j + 1 : j + p.rotary_dim / 2))];
          const double c = std::cos(double(t) * f[size_t(j)]) * p.attention_factor, s = std::sin(double(t) * f[size_t(j)]) * p.attention_factor;
          const double x = a * c - b * s;
          b = b * c + a * s;
          a = x;
        }
  }
  void op(const Instr& i, const KvAppendParams& p, Values&) {
    keys_ = in(i.in[0]);
    if (p.rotary_dim > 0) rotate(p.rope(), *weight(i, Role::kInvFreq), keys_);
    cached_values_ = in(i.in[1]);
  }
  void op(const Instr& i, const AttentionParams& p, Values& out) {
    const Values q = in(i.in[0]);
    const Values selection = i.in.size() > 2 ? in(i.in[2]) : Values();
    const auto* sinks = weight(i, Role::kSinks);
    for (size_t t = 0; t < q.size(); ++t) {
      Row o;
      for (int64_t h = 0; h < p.heads; ++h) {
        const int64_t g = h / (p.heads / p.kv_heads);
        Row weights(t + 1, 0), sum(size_t(p.v_dim), 0);
        double total = sinks ? std::exp(double((*sinks)[size_t(h)])) : 0;
        for (size_t j = 0; j <= t; ++j) {
          if (p.window > 0 && int64_t(t - j) >= p.window) continue;
          if (!selection.empty()) {
            const int64_t k = i.in[2].type.cols / p.kv_heads;
            const auto begin = selection[t].begin() + g * k;
            if (std::find(begin, begin + k, double(int64_t(j) / p.select_block)) == begin + k) continue;
          }
          double s = 0;
          for (int64_t d = 0; d < p.k_dim; ++d) s += q[t][size_t(h * p.k_dim + d)] * keys_[j][size_t(g * p.k_dim + d)];
          s *= p.scale;
          if (p.softcap > 0) s = p.softcap * std::tanh(s / p.softcap);
          total += weights[j] = std::exp(s);
        }
        for (size_t j = 0; j <= t; ++j)
          for (int64_t d = 0; d < p.v_dim; ++d) sum[size_t(d)] += weights[j] / total * cached_values_[j][size_t(g * p.v_dim + d)];
        o.insert(o.end(), sum.begin(), sum.end());
      }
      out.push_back(o);
    }
  }
  void op(const Instr& i, const IndexAppendParams&, Values&) { index_keys_ = in(i.in[0]); }
  void op(const Instr& i, const IndexSelectParams& p, Values& out) {
    const Values q = in(i.in[0]);
    for (size_t t = 0; t < q.size(); ++t) {
      Row all;
      for (int64_t h = 0; h < p.heads; ++h) {
        Row best(t / size_t(p.block) + 1, -INFINITY);
        for (size_t j = 0; j <= t; ++j) {
          double s = 0;
          for (int64_t d = 0; d < p.dim; ++d) s += q[t][size_t(h * p.dim + d)] * index_keys_[j][size_t(d)];
          best[j / size_t(p.block)] = std::max(best[j / size_t(p.block)], s);
        }
        for (int64_t b = 0; b < p.local && b < int64_t(best.size()); ++b) best[best.size() - 1 - size_t(b)] = INFINITY;
        std::vector<int64_t> ids = top(best, std::min(size_t(p.topk), best.size()));
        ids.resize(size_t(p.topk), -1);
        all.insert(all.end(), ids.begin(), ids.end());
      }
      out.push_back(all);
    }
  }
  // Ascending.
  static std::vector<int64_t> top(const Row& v, size_t k) {
    std::vector<int64_t> ids(v.size());
    std::iota(ids.begin(), ids.end(), 0);
    std::stable_sort(ids.begin(), ids.end(), [&](int64_t a, int64_t b) { return v[size_t(a)] > v[size_t(b)]; });
    ids.resize(k);
    std::sort(ids.begin(), ids.end());
    return ids;
  }
  void op(const Instr& i, const AddParams&, Values& out) {
    out = in(i.in[0]);
    const Values b = in(i.in[1]);
    for (size_t t = 0; t < out.size(); ++t) add(out[t], b[t]);
  }
  void op(const Instr& i, const ScaleParams& p, Values& out) {
    for (Row& r : out = in(i.in[0]))
      for (double& v : r) v *= p.factor;
  }
  void op(const Instr& i, const ActivationParams& p, Values& out) {
    const Values g = in(i.in[0]), u = i.in.size() > 1 ? in(i.in[1]) : g;
    const size_t n = size_t(i.out[0].type.cols), up = i.in.size() > 1 ? 0 : n;
    for (size_t t = 0; t < g.size(); ++t) {
      out.emplace_back();
      for (size_t j = 0; j < n; ++j) out.back().push_back(act(p.kind, p.alpha, p.limit, g[t][j], u[t][up + j]));
    }
  }
  // This model's router: sigmoid scores, select bias, renormalised, scaled.
  void op(const Instr& i, const RouteParams& p, Values& out) {
    const auto& bias = *weight(i, Role::kSelectBias);
    for (const Row& x : in(i.in[0])) {
      Row s, c;
      for (size_t e = 0; e < x.size(); ++e) {
        s.push_back(sigmoid(x[e]));
        c.push_back(s[e] + bias[e]);
      }
      Row r;
      double sum = 0;
      for (int64_t e : top(c, size_t(p.k))) {
        r.push_back(double(e));
        sum += s[size_t(e)];
      }
      for (int64_t j = 0; j < p.k; ++j) r.push_back(s[size_t(r[size_t(j)])] / sum * p.scale);
      out.push_back(r);
    }
  }
  // Route rows hold ids, then weights.
  const Values& route(const Instr& i) const { return values_[size_t(i.in[1].buffer)]; }
  void op(const Instr& i, const ExpertLinearParams&, Values& out) {
    const Values x = in(i.in[0]);
    const size_t k = size_t(i.in[1].type.cols);
    for (size_t pair = 0; pair < route(i).size() * k; ++pair) {
      const Row& row = x[i.in[0].type.rows == Rows::kPair ? pair : pair / k];
      out.push_back(multiply(*weight(i, Role::kWeight), weight(i, Role::kBias), int64_t(route(i)[pair / k][pair % k]), i.out[0].type.cols, row));
    }
  }
  void op(const Instr& i, const ExpertCombineParams&, Values& out) {
    const Values y = in(i.in[0]);
    const size_t k = size_t(i.in[1].type.cols);
    for (size_t t = 0; t < route(i).size(); ++t) {
      out.emplace_back(y[0].size(), 0.0);
      for (size_t j = 0; j < k; ++j)
        for (size_t c = 0; c < y[0].size(); ++c) out[t][c] += route(i)[t][k + j] * y[t * k + j][c];
    }
  }
  void op(const Instr& i, const GroupedExpertsParams& p, Values& out) {
    const Values x = in(i.in[0]);
    const size_t k = size_t(i.in[1].type.cols);
    const bool int8 = i.in[0].type.elem == Elem::kQ8;
    for (size_t t = 0; t < x.size(); ++t) {
      out.emplace_back(size_t(i.out[0].type.cols), 0.0);
      for (size_t j = 0; j < k; ++j) {
        const int64_t e = int64_t(route(i)[t][j]);
        const auto& gate = *weight(i, Role::kGate);
        const int64_t inner = int64_t(gate.size() / x[t].size()) / experts(i);
        const Row g = multiply(gate, weight(i, Role::kGateBias), e, inner, x[t]), u = multiply(*weight(i, Role::kUp), weight(i, Role::kUpBias), e, inner, x[t]);
        Row h;
        for (size_t c = 0; c < g.size(); ++c) h.push_back(act(p.kind, p.alpha, p.limit, g[c], u[c]));
        if (int8) h = quantize(h, stored_scale(i), p.saturate);
        const Row y = multiply(*weight(i, Role::kDown), weight(i, Role::kDownBias), e, i.out[0].type.cols, h);
        for (size_t c = 0; c < y.size(); ++c) out[t][c] += route(i)[t][k + j] * y[c];
      }
    }
  }
  int64_t experts(const Instr& i) const { return model_.manifest().weights[size_t(i.weights[0].tensor)].experts; }
  void op(const Instr& i, const SigmoidMulParams&, Values& out) {
    out = in(i.in[0]);
    const Values g = in(i.in[1]);
    for (size_t t = 0; t < out.size(); ++t)
      for (double& v : out[t]) v *= sigmoid(g[t][0]);
  }
  void op(const Instr&, const SliceParams&, Values&) { MI_CHECK(false); }
  void op(const Instr& i, const SelectRowsParams&, Values& out) { out = in(i.in[0]); }

  const TestModel& model_;
  const std::vector<int32_t>& ids_;
  std::vector<Values> values_;      // by buffer
  Values keys_, cached_values_, index_keys_;   // of the layer being run
};

}  // namespace mi::exec::testing
