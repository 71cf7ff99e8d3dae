#include "quant/observe.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "base/util.h"

namespace mi::quant {
namespace {

std::set<ValueKey> values_read_by_matrices(const ir::Graph& g) {
  std::set<ValueKey> keys;
  for (const ir::Block& b : g.blocks)
    for (const ir::Node& n : b.nodes) {
      if (n.op != Op::kLinear && n.op != Op::kExpertLinear) continue;
      for (int32_t layer : b.layers) keys.insert({layer, b.values[size_t(n.in[0])].name});
    }
  return keys;
}

}  // namespace

Observations observe(exec::Engine& engine, const ir::Graph& g, const CalibrationSet& set) {
  const std::set<ValueKey> wanted = values_read_by_matrices(g);
  Observations o;
  exec::Tap tap;
  tap.want = [&](const artifact::Instr& i, bool input) {
    return !input && (i.op == Op::kRoute || wanted.count({i.layer, i.name}) != 0);
  };
  tap.see = [&](const exec::TapEvent& e) {
    if (e.ids) {
      std::vector<int64_t>& count = o.expert_tokens[e.instr->layer];
      count.resize(size_t(std::get<RouteParams>(e.instr->params).experts));
      for (int64_t i = 0; i < e.rows * e.cols; ++i) ++count[size_t(e.ids[i])];
      return;
    }
    std::vector<float>& m = o.max_abs[{e.instr->layer, e.instr->name}];
    m.resize(size_t(e.cols));
    for (int64_t r = 0; r < e.rows; ++r)
      for (int64_t c = 0; c < e.cols; ++c) m[size_t(c)] = std::max(m[size_t(c)], std::fabs(e.values[r * e.cols + c]));
  };
  engine.set_tap(&tap);

  std::vector<int32_t> pages(size_t(engine.kv_pages()));
  std::iota(pages.begin(), pages.end(), 0);
  Progress progress("calibrate, tokens", uint64_t(set.tokens), false);
  for (const std::vector<int32_t>& ids : set.sequences) {
    const int64_t step = engine.options().max_tokens_per_step;
    for (int64_t at = 0; at < int64_t(ids.size()); at += step) {
      const int64_t n = std::min(step, int64_t(ids.size()) - at);
      exec::Batch batch;
      batch.chunks.push_back({std::span(ids).subspan(size_t(at), size_t(n)), at, pages, n});
      engine.run(batch);
    }
    progress.advance(ids.size());
  }
  engine.set_tap(nullptr);
  progress.done();
  return o;
}

}  // namespace mi::quant
