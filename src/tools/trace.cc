#include "tools/trace.h"

#include <algorithm>
#include <numeric>

namespace mi::tools {
namespace {

void append_sorted(const exec::TapEvent& e, Trace::Routing* out) {
  out->k = e.cols;
  std::vector<int64_t> order(static_cast<size_t>(e.cols));
  for (int64_t r = 0; r < e.rows; ++r) {
    const float* w = e.values + r * e.cols;
    const int32_t* id = e.ids + r * e.cols;
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(),
              [&](int64_t a, int64_t b) { return w[a] != w[b] ? w[a] > w[b] : id[a] < id[b]; });
    for (int64_t i : order) {
      out->ids.push_back(id[i]);
      out->weights.push_back(w[i]);
    }
  }
}

}  // namespace

Trace trace(exec::Engine& engine, std::span<const int32_t> ids, const Residual* given) {
  Trace t;
  exec::Tap tap;
  int64_t first = 0;
  tap.want = [&](const artifact::Instr& i, bool input) {
    return !input && ((i.layer_output && !given) || i.op == Op::kRoute);
  };
  tap.see = [&](const exec::TapEvent& e) {
    if (e.operand != &e.instr->out[0]) return;
    if (e.ids) {
      append_sorted(e, &t.routing[e.instr->layer]);
    } else if (e.instr->layer_output) {
      std::vector<float>& r = t.residual[e.instr->layer];
      r.insert(r.end(), e.values, e.values + e.rows * e.cols);
    }
  };
  if (given) {
    tap.replaces = [](const artifact::Instr& i) { return i.layer_output; };
    tap.replace = [&](const artifact::Instr& i, int64_t row, std::span<float> values) {
      std::vector<float>& r = t.residual[i.layer];
      r.insert(r.end(), values.begin(), values.end());
      std::copy_n(given->at(i.layer).begin() + (first + row) * int64_t(values.size()), values.size(), values.begin());
    };
  }
  engine.set_tap(&tap);
  std::vector<int32_t> pages(size_t(engine.kv_pages()));
  std::iota(pages.begin(), pages.end(), 0);
  const int64_t step = engine.options().max_tokens_per_step;
  for (int64_t at = 0; at < int64_t(ids.size()); at += step) {
    first = at;
    exec::Batch b;
    b.chunks.push_back({ids.subspan(size_t(at), size_t(std::min(step, int64_t(ids.size()) - at))), at, pages, 0});
    const std::span<const float> logits = engine.run(b);
    t.logits.insert(t.logits.end(), logits.begin(), logits.end());
  }
  engine.set_tap(nullptr);
  return t;
}

}  // namespace mi::tools
