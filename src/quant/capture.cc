#include "quant/capture.h"

#include <algorithm>
#include <cmath>

#include "quant/axpy.h"

namespace mi::quant {

std::vector<MatrixUse> matrix_uses(const ir::Block& b) {
  std::vector<MatrixUse> uses;
  for (const ir::Node& n : b.nodes) {
    if (n.op != Op::kLinear && n.op != Op::kExpertLinear) continue;
    ir::ValueId in = n.in[0];
    for (const ir::Node& maker : b.nodes)  // an int8 matrix reads a quantize node's result: the float value is before it
      if (maker.op == Op::kQuantize && maker.out[0] == in) in = maker.in[0];
    const ir::Value& v = b.values[size_t(in)];
    for (const ir::WeightUse& u : n.weights)
      if (u.role == Role::kWeight)
        for (int32_t w : u.weights)
          uses.push_back({w, v.name, v.type.cols, n.op == Op::kExpertLinear, v.type.rows == Rows::kPair});
  }
  return uses;
}

std::vector<int64_t> LayerCapture::rows_of(const Fed& f, int64_t expert) const {
  std::vector<int64_t> rows;
  if (expert < 0) {
    for (int64_t r = 0; r < int64_t(f.rows.size()) / f.cols; ++r) rows.push_back(r);
    return rows;
  }
  for (int64_t t = 0; t < kept; ++t)
    for (int64_t j = 0; j < k; ++j)
      if (chosen[size_t(t * k + j)] == expert) rows.push_back(f.pairs ? t * k + j : t);
  return rows;
}

ExpertRows expert_rows(const LayerCapture& c, const std::string& value, int64_t expert, int64_t min_tokens) {
  const Fed& own = c.values.at(value);
  ExpertRows r{&own, c.rows_of(own, expert)};
  if (expert < 0 || !c.forced || c.expert_tokens[size_t(expert)] >= min_tokens) return r;
  const Fed& forced = c.forced->values.at(value);
  return {&forced, c.forced->rows_of(forced, expert)};
}

ir::MirDir with_all_experts(ir::MirDir piece) {
  ir::Block& b = piece.graph.blocks.at(0);
  for (ir::Node& n : b.nodes) {
    if (n.op != Op::kRoute) continue;
    RouteParams& p = std::get<RouteParams>(n.params);
    p.k = p.experts;
    p.groups = p.groups_keep = 1;
    b.values[size_t(n.out[0])].type.cols = p.k;
  }
  return piece;
}

LayerCapture capture_layer(PieceEngine& engine, const ir::Block& block, int32_t layer, const Sequences& s,
                           std::span<const float> in, std::span<float> out, int64_t keep_tokens) {
  LayerCapture c;
  c.layer = layer;
  for (const MatrixUse& u : matrix_uses(block)) {
    Fed& f = c.values[u.value];
    f.cols = u.cols;
    f.pairs = u.pairs;
    f.max_abs.resize(size_t(u.cols));
  }
  const int64_t total = token_count(s), keep = std::min(keep_tokens, total);
  const auto kept = [&](int64_t token) { return (token + 1) * keep / total > token * keep / total; };
  Watch watch;
  watch.want = [&](const artifact::Instr& i) {
    return i.layer >= 0 && (i.op == Op::kRoute || c.values.count(i.name) != 0);
  };
  watch.see = [&](const exec::TapEvent& e, int64_t first) {
    if (e.ids) {
      c.k = e.cols;
      c.expert_tokens.resize(size_t(std::get<RouteParams>(e.instr->params).experts));
      for (int64_t i = 0; i < e.rows * e.cols; ++i) ++c.expert_tokens[size_t(e.ids[i])];
      for (int64_t t = 0; t < e.rows; ++t)
        if (kept(first + t)) c.chosen.insert(c.chosen.end(), e.ids + t * e.cols, e.ids + (t + 1) * e.cols);
      return;
    }
    Fed& f = c.values.at(e.instr->name);
    if (e.cols != f.cols) return;
    const int64_t per_token = f.pairs ? c.k : 1;
    for (int64_t r = 0; r < e.rows; ++r) {
      const float* row = e.values + r * f.cols;
      for (int64_t i = 0; i < f.cols; ++i) f.max_abs[size_t(i)] = std::max(f.max_abs[size_t(i)], std::fabs(row[i]));
      if (kept(first + r / per_token)) f.rows.insert(f.rows.end(), row, row + f.cols);
    }
  };
  engine.run_layer(s, in, out, &watch);
  c.kept = keep;
  return c;
}

std::vector<float> gram_matrix(const Fed& f, std::span<const int64_t> rows, std::span<const float> divisor,
                               hw::ThreadPool* pool) {
  const int64_t cols = f.cols, n = int64_t(rows.size()), k = (cols + kGramColumns - 1) / kGramColumns * kGramColumns;
  std::vector<float> scaled(size_t(n * k));  // the rows, divided, with zeros up to k
  for (int64_t r = 0; r < n; ++r)
    for (int64_t i = 0; i < cols; ++i) {
      const float x = f.rows[size_t(rows[size_t(r)] * cols + i)];
      scaled[size_t(r * k + i)] = divisor.empty() ? x : x / divisor[size_t(i)];
    }
  std::vector<float> h(size_t(k * k));
  constexpr int64_t kBlock = 64;  // rows that stay in the caches while tiles of the upper half go by
  const int64_t tasks = k / kGramColumns;
  const auto task = [&](int64_t t, int) {
    for (int64_t r0 = 0; r0 < n; r0 += kBlock)
      for (int64_t i = t * kGramColumns; i < (t + 1) * kGramColumns; i += kGramRows)
        add_products(h.data(), scaled.data() + r0 * k, std::min(n - r0, kBlock), k, i);
  };
  if (pool)
    pool->run(tasks, task);
  else
    for (int64_t t = 0; t < tasks; ++t) task(t, 0);
  for (int64_t i = 0; i < cols; ++i)
    for (int64_t j = 0; j < cols; ++j) h[size_t(i * cols + j)] = i <= j ? h[size_t(i * k + j)] : h[size_t(j * cols + i)];
  h.resize(size_t(cols * cols));
  return h;
}

}  // namespace mi::quant
