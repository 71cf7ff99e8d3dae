#include "kernels/route/route.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/dispatch.h"
#include "kernels/rows.h"
#include "kernels/scratch.h"

MI_KERNEL(void, route_softmax, (const float* x, int64_t n, float* y))
MI_KERNEL(void, route_sigmoid, (const float* x, int64_t n, float* y))

namespace mi::kernels {
namespace {

constexpr float kBelowAll = -std::numeric_limits<float>::infinity();

// Working memory of one row.
struct Row {
  float* p;         // scores
  float* c;         // what selection compares; never NaN
  float* group;
  int32_t* ids;     // chosen
  bool* kept;       // groups
};

// The k largest of v[0..n), ties to the lower index, in descending order of value.
void top_k(const float* v, int64_t n, int64_t k, int32_t* out) {
  int64_t have = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (have == k && !(v[i] > v[out[k - 1]])) continue;
    int64_t at = have < k ? have++ : k - 1;
    for (; at > 0 && v[i] > v[out[at - 1]]; --at) out[at] = out[at - 1];
    out[at] = int32_t(i);
  }
}

// Other groups' scores become the fill value.
void keep_groups(const RouteParams& p, const Row& r) {
  const int64_t size = p.experts / p.groups;
  for (int64_t g = 0; g < p.groups; ++g) {
    float best = kBelowAll, second = kBelowAll;
    for (int64_t i = 0; i < size; ++i) {
      const float v = r.c[g * size + i];
      if (v > best) {
        second = best;
        best = v;
      } else if (v > second) {
        second = v;
      }
    }
    r.group[g] = p.group_by == GroupBy::kMax || size == 1 ? best : best + second;
    r.kept[g] = false;
  }
  top_k(r.group, p.groups, p.groups_keep, r.ids);
  for (int64_t i = 0; i < p.groups_keep; ++i) r.kept[r.ids[i]] = true;
  for (int64_t e = 0; e < p.experts; ++e)
    if (!r.kept[e / size]) r.c[e] = p.group_fill_zero ? 0.0f : kBelowAll;
}

}  // namespace

void route_rows(const RouteParams& p, const RouteArgs& a, int64_t begin, int64_t end, const hw::CpuFeatures& cpu) {
  const auto softmax = MI_PICK(route_softmax, cpu);
  const auto sigmoid = MI_PICK(route_sigmoid, cpu);
  Row r{};
  carve_scratch([&](ScratchCarver& c) {
    r.p = c.take<float>(p.experts);
    r.c = c.take<float>(p.experts);
    r.group = c.take<float>(p.groups);
    r.ids = c.take<int32_t>(std::max(p.k, p.groups_keep));
    r.kept = c.take<bool>(p.groups);
  });
  for (int64_t t = begin; t < end; ++t) {
    const float* logits = row_at(a.logits, a.logits_stride, t);
    switch (p.score) {
      case RouteScore::kSoftmax: softmax(logits, p.experts, r.p); break;
      case RouteScore::kSigmoid: sigmoid(logits, p.experts, r.p); break;
      case RouteScore::kNone: std::memcpy(r.p, logits, size_t(p.experts) * 4); break;
    }
    for (int64_t e = 0; e < p.experts; ++e) {
      const float c = a.select_bias ? r.p[e] + a.select_bias[e] : r.p[e];
      r.c[e] = std::isnan(c) ? kBelowAll : c;
    }
    if (p.groups > 1) keep_groups(p, r);
    top_k(r.c, p.experts, p.k, r.ids);
    std::sort(r.ids, r.ids + p.k);

    int32_t* ids = reinterpret_cast<int32_t*>(static_cast<char*>(a.out) + t * a.out_stride);
    float* w = reinterpret_cast<float*>(ids + p.k);
    std::memcpy(ids, r.ids, size_t(p.k) * 4);
    for (int64_t i = 0; i < p.k; ++i) w[i] = r.p[ids[i]];
    if (p.softmax_after) softmax(w, p.k, w);
    if (p.renorm) {
      float sum = 0;
      for (int64_t i = 0; i < p.k; ++i) sum += w[i];
      const float d = std::max(sum + p.renorm_eps, p.renorm_min);
      for (int64_t i = 0; i < p.k; ++i) w[i] /= d;
    }
    if (p.scale != 1.0f)
      for (int64_t i = 0; i < p.k; ++i) w[i] *= p.scale;
  }
}

void route_run(const RouteParams& p, const RouteArgs& a, hw::ThreadPool& pool, const hw::CpuFeatures& cpu) {
  run_rows(pool, a.rows, p.experts, [&](int64_t begin, int64_t end, int) { route_rows(p, a, begin, end, cpu); });
}

}  // namespace mi::kernels
