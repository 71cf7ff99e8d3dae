#include "compiler/expert_order.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "artifact/expert_reads.h"
#include "artifact/layout.h"
#include "base/html.h"
#include "base/util.h"
#include "compiler/emit.h"
#include "compiler/fallbacks.h"

namespace mi::compiler {
namespace {

using artifact::ExpertProfile;
using artifact::Instr;
using artifact::Manifest;

constexpr double kLeast = 0.02;        // gain that is worth another order
constexpr double kErrors = 3;          // standard errors that it has to be above zero
constexpr int64_t kBlocks = 16;        // of neighbouring tokens, which are not independent, for that error
constexpr int64_t kLeastJudged = 8 * kBlocks;

// The busiest first, then always the one that was chosen most often together with the one before.
std::vector<int32_t> order_by_company(const ExpertProfile::Layer& l, int64_t tokens) {
  const size_t n = size_t(l.experts);
  std::vector<int32_t> together(n * n);
  for (int64_t t = 0; t < tokens; ++t)
    for (const int32_t x : l.of(t))
      for (const int32_t y : l.of(t)) ++together[size_t(x) * n + size_t(y)];
  std::vector<int32_t> order;
  std::vector<bool> taken(n);
  for (size_t place = 0; place < n; ++place) {
    int32_t best = -1;
    const auto worth = [&](int32_t e) { return std::pair(order.empty() ? 0 : together[size_t(order.back()) * n + size_t(e)], together[size_t(e) * (n + 1)]); };
    for (int32_t e = 0; e < int32_t(n); ++e)
      if (!taken[size_t(e)] && (best < 0 || worth(e) > worth(best))) best = e;
    taken[size_t(best)] = true;
    order.push_back(best);
  }
  return order;
}

ReadCost cost_of(const std::vector<std::vector<artifact::ExpertMatrix>>& instrs, const std::vector<int32_t>& slots, std::span<const int32_t> ids,
                 std::vector<int32_t>* places) {
  places->clear();
  for (const int32_t e : ids) places->push_back(slots[size_t(e)]);
  std::sort(places->begin(), places->end());
  ReadCost c;
  for (const auto& matrices : instrs)
    artifact::each_read(matrices, *places, [&](size_t, artifact::PageRange pages, size_t, size_t) {
      c.pages += double(pages.bytes / artifact::kReadPage);
      ++c.reads;
    });
  return c;
}

void judge(const ExpertProfile& p, const ExpertProfile::Layer& l, const std::vector<std::vector<artifact::ExpertMatrix>>& instrs,
           const std::vector<int32_t>& as_is, LayerOrder* o) {
  o->judged = p.tokens - p.half();
  std::vector<double> saved(kBlocks);
  double all = 0;
  std::vector<int32_t> places;
  for (int64_t t = p.half(); t < p.tokens; ++t) {
    const ReadCost a = cost_of(instrs, as_is, l.of(t), &places), b = cost_of(instrs, o->slots, l.of(t), &places);
    for (auto [sum, one] : {std::pair(&o->as_is, &a), std::pair(&o->learnt, &b)}) {
      sum->pages += one->pages / double(o->judged);
      sum->reads += one->reads / double(o->judged);
    }
    saved[size_t((t - p.half()) * kBlocks / o->judged)] += a.bytes() - b.bytes();
    all += a.bytes();
  }
  if (all == 0) return;
  const double mean = std::accumulate(saved.begin(), saved.end(), 0.0) / double(kBlocks);
  double spread = 0;
  for (const double s : saved) spread += (s - mean) * (s - mean) / double(kBlocks - 1);
  o->gain = mean * double(kBlocks) / all;
  o->error = std::sqrt(spread * double(kBlocks)) / all;
}

// Where weights will lie, but for what an estimate of their sizes is wrong by.
void estimate_places(Manifest* m) {
  int64_t at = 0, segment = 0;
  for (artifact::WeightTensor& w : m->weights) {
    if (at > segment && at - segment + stored_bytes(w) > artifact::kSegmentBytes) segment = at = artifact::round_up(at, artifact::kSegmentAlign);
    w.offset = at;
    w.scale_offset = artifact::round_up(at + w.bytes, artifact::kAlign);
    at += stored_bytes(w);
  }
}

struct Sum {
  ReadCost as_is, then;
  double gain() const { return as_is.bytes() > 0 ? 1 - then.bytes() / as_is.bytes() : 0; }
};
// paying: what the build does; else: if all layers were in the learnt order.
Sum sum_of(const ExpertOrder& o, bool paying) {
  Sum s;
  for (const LayerOrder& l : o.layers) {
    const ReadCost& then = paying && !l.pays() ? l.as_is : l.learnt;
    s.as_is.pages += l.as_is.pages, s.as_is.reads += l.as_is.reads;
    s.then.pages += then.pages, s.then.reads += then.reads;
  }
  return s;
}

std::string spread_text(const ExpertOrder& o) {
  double low = 0, high = 0, covered[3] = {};
  for (const LayerOrder& l : o.layers) {
    low = low == 0 ? l.spread.skew : std::min(low, l.spread.skew);
    high = std::max(high, l.spread.skew);
    for (size_t s = 0; s < 3; ++s) covered[s] += l.spread.covered[s] / double(o.layers.size());
  }
  return fmt::format("skew {:.2f} to {:.2f} (the busiest expert's tokens over the mean); the busiest 10 / 25 / 50 % of experts get {:.1f} / {:.1f} / {:.1f} % of the choices",
                     low, high, covered[0] * 100, covered[1] * 100, covered[2] * 100);
}

std::string effect_text(const Sum& s) {
  return fmt::format("{:.1f} pages of 4 KB in {:.1f} reads instead of {:.1f} in {:.1f} ({:+.1f} %)", s.then.pages, s.then.reads, s.as_is.pages, s.as_is.reads,
                     0 - s.gain() * 100);
}

std::string measured_text(const OrderReplay& r) {
  return fmt::format("{:.3f} of the time: {} for the experts of {} tokens, {} in the order of their numbers; {} reads instead of {}; {}", r.as_is > 0 ? r.learnt / r.as_is : 1,
                     human_seconds(r.learnt), r.tokens, human_seconds(r.as_is), r.learnt_reads, r.as_is_reads, r.how);
}

// Why most of the layers that stay do.
std::string most_common_reason(const ExpertOrder& o) {
  std::map<std::string, int> votes;
  for (const LayerOrder& l : o.layers)
    if (!l.pays()) ++votes[l.why_not()];
  return std::max_element(votes.begin(), votes.end(), [](const auto& x, const auto& y) { return x.second < y.second; })->first;
}

std::string unknown_text(const ExpertOrder& o) {
  return o.unknown > 0 ? fmt::format("; {} layer{} not in the profile stay{}", o.unknown, o.unknown == 1 ? "" : "s", o.unknown == 1 ? "s" : "") : "";
}

}  // namespace

int64_t busiest(double share, int64_t experts) { return std::max<int64_t>(1, int64_t(share * double(experts) + 0.5)); }

ExpertSpread spread_of(const ExpertProfile::Layer& l, int64_t tokens) {
  const int64_t half = tokens / 2;
  const std::vector<int64_t> first = l.counts(0, half), second = l.counts(half, tokens), all = l.counts(0, tokens);
  std::vector<size_t> order(first.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t x, size_t y) { return first[x] > first[y]; });
  ExpertSpread s;
  s.skew = double(*std::max_element(all.begin(), all.end())) * double(l.experts) / double(tokens * l.k);
  for (size_t i = 0; i < 3; ++i) {
    int64_t covered = 0;
    for (int64_t e = 0; e < busiest(kCoverShares[i], l.experts); ++e) covered += second[order[size_t(e)]];
    s.covered[i] = double(covered) / double((tokens - half) * l.k);
  }
  return s;
}

bool LayerOrder::pays() const { return judged >= kLeastJudged && gain >= kLeast && gain > kErrors * error; }

std::string LayerOrder::why_not() const {
  const int64_t pages = (matrix_bytes + artifact::kReadPage - 1) / artifact::kReadPage;
  if (judged < kLeastJudged) return fmt::format("{} tokens to judge by are too few, {} are the least", judged, kLeastJudged);
  if (gain >= kLeast) return fmt::format("that may be chance (standard error {:.1f} %)", error * 100);
  if (2 * (matrix_bytes + artifact::kReadPage) > artifact::kReadTogether)
    return fmt::format("experts' matrices have up to {} pages, and reading such neighbours together is no faster than side by side", pages);
  return "tokens choose too evenly";
}

std::vector<LayerOrder> learn_order(const ExpertProfile& p, const Manifest& m) {
  std::vector<LayerOrder> all;
  for (const ExpertProfile::Layer& l : p.layers) {
    LayerOrder o;
    o.layer = l.layer;
    o.spread = spread_of(l, p.tokens);
    const std::vector<int32_t> order = order_by_company(l, p.half());
    o.slots.resize(order.size());
    for (size_t i = 0; i < order.size(); ++i) o.slots[size_t(order[i])] = int32_t(i);
    std::vector<std::vector<artifact::ExpertMatrix>> instrs;
    std::vector<int32_t> as_is(order.size());
    std::iota(as_is.begin(), as_is.end(), 0);
    for (const Instr& i : m.program) {
      if (i.layer != l.layer || artifact::expert_roles(i).empty()) continue;
      instrs.push_back(artifact::expert_matrices(m, i));
      for (const artifact::ExpertMatrix& x : instrs.back()) o.matrix_bytes = std::max(o.matrix_bytes, x.bytes);
      const artifact::WeightTensor& w = artifact::tensor_of(m, i, artifact::expert_roles(i)[0]);
      for (size_t e = 0; e < as_is.size(); ++e) as_is[e] = int32_t(artifact::expert_slot(w, int64_t(e)));
    }
    if (instrs.empty()) continue;
    judge(p, l, instrs, as_is, &o);
    all.push_back(std::move(o));
  }
  return all;
}

int64_t ExpertOrder::reordered() const {
  return std::count_if(layers.begin(), layers.end(), [](const LayerOrder& l) { return l.pays(); });
}

ExpertOrder order_experts(const ExpertProfile& p, Manifest* m) {
  ExpertOrder o{p.source, p.tokens, {}, 0, {}};
  Manifest placed = *m;
  estimate_places(&placed);
  o.layers = learn_order(p, placed);
  for (const Instr& i : m->program) {
    const auto l = std::find_if(o.layers.begin(), o.layers.end(), [&](const LayerOrder& x) { return x.layer == i.layer; });
    if (i.op == Op::kRoute && l == o.layers.end()) ++o.unknown;
    if (l == o.layers.end() || !l->pays()) continue;
    for (const Role role : artifact::expert_roles(i)) m->weights[size_t(&artifact::tensor_of(*m, i, role) - m->weights.data())].expert_slots = l->slots;
  }
  return o;
}

std::string expert_order_text(const ExpertOrder& o) {
  if (o.layers.empty()) return "expert order  kept: no layer of the profile has experts here\n";
  if (o.reordered() == 0)
    return fmt::format("expert order  kept: by {} tokens of {}, judged on their second half, a token would read {}: {}{}\n  {}\n", o.tokens, o.source,
                       effect_text(sum_of(o, false)), most_common_reason(o), unknown_text(o), spread_text(o));
  std::vector<int32_t> moved;
  for (const LayerOrder& l : o.layers)
    if (l.pays()) moved.push_back(l.layer);
  std::string s = fmt::format("expert order  {} by how {} tokens of {} choose{}{}\n", layers_text(moved), o.tokens, o.source,
                              moved.size() < o.layers.size() ? "; the others stay: " + most_common_reason(o) : "", unknown_text(o));
  s += fmt::format("  chosen        {}\n", spread_text(o));
  s += fmt::format("  expected      learnt from the first half, judged on the second: a token whose experts are on disk reads {}\n", effect_text(sum_of(o, true)));
  if (o.replay) s += fmt::format("  measured      {}\n", measured_text(*o.replay));
  return s;
}

std::string expert_order_html(const ExpertOrder& o) {
  using html::escape;
  std::string s = "<h2>Order of experts</h2>\n<pre>" + escape(expert_order_text(o)) + "</pre>\n<details><summary>Layer by layer</summary>\n<table>\n";
  s += html::row({"layer", "order", "skew", "busiest 10 %", "25 %", "50 %", "pages, reads as they lie", "in the learnt order", "saved", "standard error"}, "th");
  const auto cost = [](const ReadCost& c) { return fmt::format("{:.1f}, {:.1f}", c.pages, c.reads); };
  const auto percent = [](double v) { return fmt::format("{:.1f} %", v * 100); };
  for (const LayerOrder& l : o.layers)
    s += html::row({fmt::format("{}", l.layer), l.pays() ? "learnt" : "kept: " + l.why_not(), fmt::format("{:.2f}", l.spread.skew), percent(l.spread.covered[0]),
                    percent(l.spread.covered[1]), percent(l.spread.covered[2]), cost(l.as_is), cost(l.learnt), percent(l.gain), percent(l.error)});
  return s + "</table></details>\n";
}

Json expert_order_json(const ExpertOrder& o) {
  Json j{{"source", o.source}, {"tokens", o.tokens}, {"reordered_layers", o.reordered()}, {"layers_not_in_profile", o.unknown}, {"layers", Json::array()}};
  const auto cost = [](const ReadCost& c) { return Json{{"pages", c.pages}, {"reads", c.reads}}; };
  for (const LayerOrder& l : o.layers) {
    j["layers"].push_back({{"layer", l.layer},
                           {"reordered", l.pays()},
                           {"skew", l.spread.skew},
                           {"covered", {{"10", l.spread.covered[0]}, {"25", l.spread.covered[1]}, {"50", l.spread.covered[2]}}},
                           {"as_is", cost(l.as_is)},
                           {"learnt", cost(l.learnt)},
                           {"gain", l.gain},
                           {"standard_error", l.error},
                           {"judged_tokens", l.judged}});
    if (!l.pays()) j["layers"].back()["why_not"] = l.why_not();
  }
  if (o.replay)
    j["measured"] = {{"tokens", o.replay->tokens},           {"seconds_as_is", o.replay->as_is},           {"seconds_learnt", o.replay->learnt},
                     {"reads_as_is", o.replay->as_is_reads}, {"reads_learnt", o.replay->learnt_reads}, {"how", o.replay->how}};
  return j;
}

}  // namespace mi::compiler
