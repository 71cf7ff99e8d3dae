#include "tools/profile/expert_profile.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/json.h"
#include "base/util.h"
#include "exec/expert_policy.h"

namespace mi::tools {
namespace {

constexpr double kShares[] = {0.1, 0.25, 0.5};
constexpr const char* kFormat = "metainfer expert profile 1";

std::vector<int64_t> counts(const ExpertProfile::Layer& l, int64_t begin, int64_t end) {
  std::vector<int64_t> n(size_t(l.experts));
  for (int64_t i = begin * l.k; i < end * l.k; ++i) ++n[size_t(l.ids[size_t(i)])];
  return n;
}

std::vector<float> chances(const ExpertProfile::Layer& l, int64_t begin, int64_t end) {
  std::vector<float> c;
  for (const int64_t n : counts(l, begin, end)) c.push_back(float(double(n) / double(std::max<int64_t>(1, end - begin))));
  return c;
}

int64_t busiest(double share, int64_t experts) { return std::max<int64_t>(1, int64_t(share * double(experts) + 0.5)); }

// Hits of the tokens [begin, end) with room for `held` experts of all layers, which is empty at first.
double hit_rate(const ExpertProfile& p, int64_t held, int64_t begin, int64_t end, const std::vector<std::vector<float>>& prior) {
  struct Entry {
    size_t layer;
    int32_t expert;
    int64_t used;
  };
  std::vector<std::vector<float>> chance = prior;
  std::vector<std::vector<int64_t>> slot;  // by layer and expert; -1: not there
  for (const ExpertProfile::Layer& l : p.layers) slot.emplace_back(size_t(l.experts), -1);
  std::vector<Entry> entries;
  int64_t clock = 0, hits = 0, wanted = 0;
  for (int64_t t = begin; t < end; ++t)
    for (size_t n = 0; n < p.layers.size(); ++n) {
      const ExpertProfile::Layer& l = p.layers[n];
      const std::span<const int32_t> ids(l.ids.data() + t * l.k, size_t(l.k));
      ++clock;
      exec::learn_chances(chance[n], ids);
      for (const int32_t e : ids) {
        ++wanted;
        int64_t& at = slot[n][size_t(e)];
        if (at >= 0) {
          ++hits;
        } else if (int64_t(entries.size()) < held) {
          at = int64_t(entries.size());
          entries.push_back({});
        } else {
          const auto score = [&](const Entry& x) { return exec::keep_score(x.used, chance[x.layer][size_t(x.expert)], int64_t(p.layers.size())); };
          const auto least = std::min_element(entries.begin(), entries.end(), [&](const Entry& x, const Entry& y) { return score(x) < score(y); });
          slot[least->layer][size_t(least->expert)] = -1;
          at = least - entries.begin();
        }
        entries[size_t(at)] = {n, e, clock};
      }
    }
  return wanted > 0 ? double(hits) / double(wanted) : 0;
}

}  // namespace

ExpertProfile record_experts(exec::Engine& engine, const std::vector<std::vector<int32_t>>& sequences, int64_t tokens) {
  ExpertProfile p;
  p.model = engine.manifest().model.name;
  for (const artifact::Instr& i : engine.manifest().program)
    if (i.op == Op::kRoute) p.layers.push_back({i.layer, std::get<RouteParams>(i.params).experts, i.out[0].type.cols, {}});
  exec::Tap tap;
  tap.want = [](const artifact::Instr& i, bool input) { return !input && i.op == Op::kRoute; };
  tap.see = [&](const exec::TapEvent& e) {
    const auto l = std::find_if(p.layers.begin(), p.layers.end(), [&](const ExpertProfile::Layer& x) { return x.layer == e.instr->layer; });
    l->ids.insert(l->ids.end(), e.ids, e.ids + e.rows * e.cols);
  };
  engine.set_tap(&tap);
  std::vector<int32_t> pages(static_cast<size_t>(engine.kv_pages()));
  std::iota(pages.begin(), pages.end(), 0);
  for (const std::vector<int32_t>& s : sequences) {
    const int64_t all = std::min<int64_t>(int64_t(s.size()), tokens - p.tokens);
    for (int64_t at = 0; at < all;) {
      const int64_t n = std::min(all - at, engine.options().max_tokens_per_step);
      exec::Batch b;
      b.chunks.push_back({std::span(s).subspan(size_t(at), size_t(n)), at, pages, n});
      engine.run(b);
      at += n;
    }
    p.tokens += std::max<int64_t>(0, all);
  }
  engine.set_tap(nullptr);
  return p;
}

Status write_expert_profile(const ExpertProfile& p, const Path& file, bool force) {
  Json j{{"format", kFormat}, {"model", p.model}, {"source", p.source}, {"tokens", p.tokens}, {"layers", Json::array()}};
  for (const ExpertProfile::Layer& l : p.layers) j["layers"].push_back({{"layer", l.layer}, {"experts", l.experts}, {"k", l.k}, {"ids", l.ids}});
  MI_TRY(OutputFile out, OutputFile::create(file, force));
  MI_TRY_VOID(out.writer().write(dump_json(j) + "\n"));
  return out.commit();
}

Result<ExpertProfile> read_expert_profile(const Path& file, const artifact::Manifest& m) {
  const std::string what = file.string();
  MI_TRY(const Json j, read_json(file));
  if (!j.is_object() || j.value("format", std::string()) != kFormat)
    return bad_input("{}: no expert profile; 'metainfer profile --experts FILE' writes one", what);
  MI_TRY_VOID(refuse_unknown_keys(j, {"format", "model", "source", "tokens", "layers"}, what));
  ExpertProfile p;
  MI_TRY(p.model, json_get<std::string>(j, "model", what));
  MI_TRY(p.source, json_get<std::string>(j, "source", what));
  MI_TRY(p.tokens, json_get<int64_t>(j, "tokens", what));
  if (!j.contains("layers") || !j["layers"].is_array()) return bad_input("{}: layers: expected an array", what);
  size_t next = 0;
  std::vector<const artifact::Instr*> routes;
  for (const artifact::Instr& i : m.program)
    if (i.op == Op::kRoute) routes.push_back(&i);
  for (const Json& x : j["layers"]) {
    const std::string where = fmt::format("{}: layers[{}]", what, next);
    if (!x.is_object()) return bad_input("{}: expected an object", where);
    MI_TRY_VOID(refuse_unknown_keys(x, {"layer", "experts", "k", "ids"}, where));
    ExpertProfile::Layer l;
    MI_TRY(const int64_t layer, json_get<int64_t>(x, "layer", where));
    MI_TRY(l.experts, json_get<int64_t>(x, "experts", where));
    MI_TRY(l.k, json_get<int64_t>(x, "k", where));
    MI_TRY(const std::vector<int64_t> ids, json_get<std::vector<int64_t>>(x, "ids", where));
    const artifact::Instr* route = next < routes.size() ? routes[next] : nullptr;
    if (!route || route->layer != layer || std::get<RouteParams>(route->params).experts != l.experts || route->out[0].type.cols != l.k)
      return bad_input("{}: layer {} with {} of {} experts is none of this engine's: the profile belongs to another model ({})", where, layer, l.k, l.experts, p.model);
    if (int64_t(ids.size()) != p.tokens * l.k) return bad_input("{}: {} ids, expected {} for {} tokens", where, ids.size(), p.tokens * l.k, p.tokens);
    for (const int64_t id : ids) {
      if (id < 0 || id >= l.experts) return bad_input("{}: expert {} of {}", where, id, l.experts);
      l.ids.push_back(int32_t(id));
    }
    l.layer = int32_t(layer);
    p.layers.push_back(std::move(l));
    ++next;
  }
  if (next != routes.size() || p.tokens < 2)
    return bad_input("{}: {} tokens and {} layers with experts, the engine has {}", what, p.tokens, next, routes.size());
  return p;
}

std::map<int32_t, std::vector<float>> expert_chances(const ExpertProfile& p) {
  std::map<int32_t, std::vector<float>> all;
  for (const ExpertProfile::Layer& l : p.layers) all[l.layer] = chances(l, 0, p.tokens);
  return all;
}

ExpertEvidence weigh_experts(const ExpertProfile& p) {
  ExpertEvidence out;
  const int64_t half = p.tokens / 2;
  std::vector<std::vector<float>> even, learnt;
  int64_t experts = 0;
  for (const ExpertProfile::Layer& l : p.layers) {
    experts += l.experts;
    even.emplace_back(size_t(l.experts), float(l.k) / float(l.experts));
    learnt.push_back(chances(l, 0, half));
    const std::vector<int64_t> first = counts(l, 0, half), second = counts(l, half, p.tokens), all = counts(l, 0, p.tokens);
    std::vector<size_t> order(first.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](size_t x, size_t y) { return first[x] > first[y]; });
    ExpertEvidence::Layer layer{l.layer, 0, {}};
    layer.skew = double(*std::max_element(all.begin(), all.end())) * double(l.experts) / double(p.tokens * l.k);
    for (size_t s = 0; s < 3; ++s) {
      const int64_t n = busiest(kShares[s], l.experts);
      int64_t covered = 0;
      for (int64_t i = 0; i < n; ++i) covered += second[order[size_t(i)]];
      layer.covered[s] = double(covered) / double((p.tokens - half) * l.k);
      out.covered[s] += layer.covered[s] / double(p.layers.size());
      out.even[s] += double(n) / double(l.experts) / double(p.layers.size());
    }
    out.layers.push_back(layer);
  }
  for (const double share : {0.125, 0.25, 0.5, 0.75}) {
    const int64_t held = std::max<int64_t>(1, int64_t(share * double(experts)));
    // Plain: no chance says more than another one, and none is learnt that was not there in the first half.
    out.caches.push_back({share, hit_rate(p, held, half, p.tokens, even), hit_rate(p, held, half, p.tokens, learnt)});
  }
  return out;
}

namespace {

// The busiest first, then always the one that was chosen most often together with the one before.
std::vector<int32_t> order_by_company(const ExpertProfile::Layer& l, int64_t tokens) {
  const size_t n = size_t(l.experts);
  std::vector<int32_t> together(n * n);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t i = 0; i < l.k; ++i)
      for (int64_t j = 0; j < l.k; ++j) ++together[size_t(l.ids[size_t(t * l.k + i)]) * n + size_t(l.ids[size_t(t * l.k + j)])];
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

int64_t pages_touched(const artifact::WeightTensor& w, const std::vector<int32_t>& place, std::span<const int32_t> ids) {
  constexpr int64_t kPage = 4096;
  std::vector<int64_t> at;
  for (const int32_t e : ids) at.push_back(w.offset + place[size_t(e)] * w.expert_stride);
  std::sort(at.begin(), at.end());
  int64_t pages = 0, seen = -1;  // seen: the last page counted
  for (const int64_t begin : at) {
    const int64_t first = std::max(begin / kPage, seen + 1), last = (begin + w.expert_stride - 1) / kPage;
    pages += last - first + 1;
    seen = last;
  }
  return pages;
}

}  // namespace

OrderEvidence weigh_order(const ExpertProfile& p, const artifact::Manifest& m) {
  OrderEvidence out;
  const int64_t half = p.tokens / 2;
  for (const ExpertProfile::Layer& l : p.layers) {
    std::vector<int32_t> as_is(size_t(l.experts)), place(as_is.size());
    std::iota(as_is.begin(), as_is.end(), 0);
    const std::vector<int32_t> order = order_by_company(l, half);
    for (size_t i = 0; i < order.size(); ++i) place[size_t(order[i])] = int32_t(i);
    for (const artifact::Instr& i : m.program) {
      if (i.layer != l.layer || (i.op != Op::kGroupedExperts && i.op != Op::kExpertLinear)) continue;
      for (const artifact::InstrWeight& x : i.weights) {
        const artifact::WeightTensor& w = m.weights[size_t(x.tensor)];
        if (w.packing == artifact::Packing::kPlain || w.experts != l.experts) continue;
        for (int64_t t = half; t < p.tokens; ++t) {
          const std::span<const int32_t> ids(l.ids.data() + t * l.k, size_t(l.k));
          out.pages += double(pages_touched(w, as_is, ids)) / double(p.tokens - half);
          out.reordered += double(pages_touched(w, place, ids)) / double(p.tokens - half);
        }
      }
    }
  }
  return out;
}

std::string order_evidence_text(const OrderEvidence& e) {
  const double gain = e.pages > 0 ? 1 - e.reordered / e.pages : 0;
  return fmt::format("order of experts: a token touches {:.1f} pages of 4 KB; {:.1f} if experts that are chosen together lay together ({:+.2f} %): {}\n", e.pages,
                     e.reordered, -gain * 100, gain < 0.02 ? "another order is worth nothing, experts stay as they are" : "another order would be worth a try");
}

std::string expert_evidence_text(const ExpertProfile& p, const ExpertEvidence& e) {
  std::string out = fmt::format("experts of {} tokens ({}); learnt from the first half, judged on the second\n", p.tokens, p.source);
  out += fmt::format("{:>6} {:>8} {:>30}\n", "layer", "skew", "choices covered by the busiest");
  out += fmt::format("{:>6} {:>8} {:>10} {:>9} {:>9}\n", "", "", "10 %", "25 %", "50 %");
  const auto row = [&](const std::string& name, const std::string& skew, const double* c) {
    out += fmt::format("{:>6} {:>8} {:>8.1f} % {:>7.1f} % {:>7.1f} %\n", name, skew, c[0] * 100, c[1] * 100, c[2] * 100);
  };
  for (const ExpertEvidence::Layer& l : e.layers) row(fmt::format("{}", l.layer), fmt::format("{:.2f}", l.skew), l.covered);
  row("all", "", e.covered);
  row("even", "", e.even);
  out += fmt::format("{:<32} {:>12} {:>16}\n", "--expert-cache for", "hits without", "with the profile");
  for (const ExpertEvidence::Cache& c : e.caches)
    out += fmt::format("{:<32} {:>10.1f} % {:>14.1f} %\n", fmt::format("{:.1f} % of the experts", c.share * 100), c.plain * 100, c.prior * 100);
  return out;
}

}  // namespace mi::tools
