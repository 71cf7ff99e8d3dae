#include "tools/profile/expert_profile.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/util.h"
#include "exec/expert_policy.h"

namespace mi::tools {
namespace {

std::vector<float> chances(const ExpertProfile::Layer& l, int64_t tokens) {
  std::vector<float> c;
  for (const int64_t x : l.counts(0, tokens)) c.push_back(float(double(x) / double(std::max<int64_t>(1, tokens))));
  return c;
}

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
      const std::span<const int32_t> ids = l.of(t);
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

std::map<int32_t, std::vector<float>> expert_chances(const ExpertProfile& p) {
  std::map<int32_t, std::vector<float>> all;
  for (const ExpertProfile::Layer& l : p.layers) all[l.layer] = chances(l, p.tokens);
  return all;
}

ExpertEvidence weigh_experts(const ExpertProfile& p) {
  ExpertEvidence out;
  const int64_t half = p.half();
  std::vector<std::vector<float>> even, learnt;
  int64_t experts = 0;
  for (const ExpertProfile::Layer& l : p.layers) {
    experts += l.experts;
    even.emplace_back(size_t(l.experts), float(l.k) / float(l.experts));
    learnt.push_back(chances(l, half));
    out.layers.push_back(compiler::spread_of(l, p.tokens));
    for (size_t s = 0; s < 3; ++s) {
      out.covered[s] += out.layers.back().covered[s] / double(p.layers.size());
      out.even[s] += double(compiler::busiest(compiler::kCoverShares[s], l.experts)) / double(l.experts) / double(p.layers.size());
    }
  }
  for (const double share : {0.125, 0.25, 0.5, 0.75}) {
    const int64_t held = std::max<int64_t>(1, int64_t(share * double(experts)));
    // Plain: no chance says more than another one, and none is learnt that was not there in the first half.
    out.caches.push_back({share, hit_rate(p, held, half, p.tokens, even), hit_rate(p, held, half, p.tokens, learnt)});
  }
  return out;
}

std::string order_evidence_text(const std::vector<compiler::LayerOrder>& layers) {
  compiler::ReadCost as_is, learnt;
  int64_t pay = 0;
  for (const compiler::LayerOrder& l : layers) {
    as_is.pages += l.as_is.pages, as_is.reads += l.as_is.reads;
    learnt.pages += l.learnt.pages, learnt.reads += l.learnt.reads;
    pay += l.pays();
  }
  std::string s = fmt::format("order of experts: a token whose experts are on disk reads {:.1f} pages of 4 KB in {:.1f} reads; {:.1f} in {:.1f} if experts that are chosen together lay together ({:+.1f} %): ",
                              as_is.pages, as_is.reads, learnt.pages, learnt.reads, as_is.bytes() > 0 ? (learnt.bytes() / as_is.bytes() - 1) * 100 : 0.0);
  if (pay > 0) return s + fmt::format("worth it in {} of {} layers, 'metainfer build --expert-profile' with this file stores them so\n", pay, layers.size());
  return s + fmt::format("another order is worth nothing: {}\n", layers.empty() ? "no experts" : layers[0].why_not());
}

std::string expert_evidence_text(const ExpertProfile& p, const ExpertEvidence& e) {
  std::string out = fmt::format("experts of {} tokens ({}); learnt from the first half, judged on the second\n", p.tokens, p.source);
  out += fmt::format("{:>6} {:>8} {:>30}\n", "layer", "skew", "choices covered by the busiest");
  out += fmt::format("{:>6} {:>8} {:>10} {:>9} {:>9}\n", "", "", "10 %", "25 %", "50 %");
  const auto row = [&](const std::string& name, const std::string& skew, const double* c) {
    out += fmt::format("{:>6} {:>8} {:>8.1f} % {:>7.1f} % {:>7.1f} %\n", name, skew, c[0] * 100, c[1] * 100, c[2] * 100);
  };
  for (size_t l = 0; l < e.layers.size(); ++l) row(fmt::format("{}", p.layers[l].layer), fmt::format("{:.2f}", e.layers[l].skew), e.layers[l].covered);
  row("all", "", e.covered);
  row("even", "", e.even);
  out += fmt::format("{:<32} {:>12} {:>16}\n", "--expert-cache for", "hits without", "with the profile");
  for (const ExpertEvidence::Cache& c : e.caches)
    out += fmt::format("{:<32} {:>10.1f} % {:>14.1f} %\n", fmt::format("{:.1f} % of the experts", c.share * 100), c.plain * 100, c.prior * 100);
  return out;
}

}  // namespace mi::tools
