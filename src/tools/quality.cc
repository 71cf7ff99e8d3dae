#include "tools/quality.h"

#include <algorithm>
#include <set>

#include "base/util.h"
#include "ir/verify.h"
#include "quant/temporary_engine.h"
#include "tools/session.h"

namespace mi::tools {
namespace {

constexpr double kHair = 1e-9;  // points and percents are quotients

bool lost_too_much(const GroupQuality& g, const QualityLimits& l) { return g.lost_points() > l.max_points + kHair; }

// `rounded` with one layer as it is in `source`. Layers meet in the residual stream only, so a whole layer can change.
Result<ir::MirDir> with_float_layer(const ir::MirDir& rounded, const ir::MirDir& source, int32_t layer) {
  ir::MirDir m = rounded;
  const int offset = int(m.files.size());
  m.files.insert(m.files.end(), source.files.begin(), source.files.end());
  const std::string prefix = fmt::format("layers.{}.", layer);
  std::erase_if(m.index, [&](const auto& e) { return e.first.starts_with(prefix); });
  for (const auto& [name, place] : source.index)
    if (name.starts_with(prefix)) m.index.emplace(name, std::pair(place.first + offset, place.second));
  ir::Block restored = source.graph.block_of(layer);
  restored.layers = {layer};
  restored.name = "restored";
  for (ir::Block& b : m.graph.blocks) std::erase(b.layers, layer);
  std::erase_if(m.graph.blocks, [](const ir::Block& b) { return b.layers.empty(); });
  m.graph.blocks.push_back(std::move(restored));
  MI_TRY_VOID(ir::verify(m.graph));
  return m;
}

class QualityRun {
 public:
  explicit QualityRun(const QualityOptions& o) : o_(o) {}

  Result<QualityReport> run() {
    MI_TRY(const ir::MirDir source, ir::MirDir::open(o_.source));
    MI_TRY(const ir::MirDir result, ir::MirDir::open(o_.result));
    QualityReport r;
    MI_TRY(r.before, evaluate(source, o_.eval));
    MI_TRY(r.after, evaluate(result, o_.eval));
    for (size_t i = 0; i < r.before.answers.size(); ++i) {
      ++r.answers;
      r.same += r.before.answers[i] == r.after.answers[i];
    }
    for (const std::string& g : r.before.group_order)
      r.groups.push_back({g, r.before.groups.at(g).accuracy(), r.after.groups.at(g).accuracy(), known_tokens(r.before, g), {}});
    std::vector<std::string> lost;
    for (const GroupQuality& g : r.groups)
      if (lost_too_much(g, o_.limits)) lost.push_back(g.group);
    if (!lost.empty()) MI_TRY_VOID(attribute(source, result, lost, &r));
    return r;
  }

 private:
  Result<EvalResult> evaluate(const ir::MirDir& mir, const EvalOptions& e) {
    MI_TRY(const quant::TemporaryEngine files, quant::build_temporary_engine(mir, o_.scratch, 2, ""));
    SessionOptions so;
    so.engine = files.path();
    so.threads = o_.threads;
    so.max_seq_len = 1024;
    so.verify_checksums = false;
    so.quiet = true;
    MI_TRY(const Session s, open_session(so));
    return run_eval(s, e);
  }

  double known_tokens(const EvalResult& r, const std::string& group) const {
    if (!o_.calibration) return -1;
    std::set<int32_t> known;
    for (const auto& ids : *o_.calibration) known.insert(ids.begin(), ids.end());
    int64_t all = 0, hits = 0;
    for (size_t i = 0; i < r.prompts.size(); ++i) {
      if (r.item_groups[i] != group) continue;
      for (int32_t id : r.prompts[i]) {
        ++all;
        hits += int64_t(known.count(id));
      }
    }
    return all ? double(hits) / double(all) : 1;
  }

  Status attribute(const ir::MirDir& source, const ir::MirDir& result, const std::vector<std::string>& lost,
                   QualityReport* r) {
    EvalOptions e = o_.eval;
    e.only_groups = lost;
    e.reference.clear();
    e.score_text = false;
    const int64_t layers = source.graph.info.layers;
    Progress progress("restore one layer at a time", uint64_t(layers), false);
    for (int32_t layer = 0; layer < layers; ++layer) {
      MI_TRY(const ir::MirDir mixed, with_float_layer(result, source, layer));
      MI_TRY(const EvalResult found, evaluate(mixed, e));
      for (GroupQuality& g : r->groups)
        if (const auto it = found.groups.find(g.group); it != found.groups.end())
          g.restored.emplace_back(layer, it->second.accuracy());
      progress.advance(1);
    }
    progress.done();
    for (GroupQuality& g : r->groups)
      std::stable_sort(g.restored.begin(), g.restored.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
    return {};
  }

  const QualityOptions& o_;
};

}  // namespace

Result<QualityReport> measure_quality(const QualityOptions& o) { return QualityRun(o).run(); }

std::vector<std::string> quality_failures(const QualityReport& r, const QualityLimits& l) {
  std::vector<std::string> out;
  for (const GroupQuality& g : r.groups)
    if (lost_too_much(g, l)) out.push_back(fmt::format("{}: loses {:.2f} points, more than {:.2f}", g.group, g.lost_points(), l.max_points));
  if (100 * r.exact_match() < l.min_exact - kHair)
    out.push_back(fmt::format("only {:.2f} % of the greedy answers are the same, token by token; the limit is {:.2f} %",
                              100 * r.exact_match(), l.min_exact));
  return out;
}

std::string quality_text(const QualityReport& r, const QualityLimits& limits) {
  constexpr double kUnknown = 0.9;
  std::string s = eval_table({{"float", r.before}, {"rounded", r.after}});
  s += fmt::format("\ngreedy answers: {} of {} the same, token by token ({:.1f} %)\n", r.same, r.answers, 100 * r.exact_match());
  for (const GroupQuality& g : r.groups) {
    if (!lost_too_much(g, limits)) continue;
    s += fmt::format("{} loses {:.2f} points ({:.2f} -> {:.2f} %)\n", g.group, g.lost_points(), 100 * g.before, 100 * g.after);
    for (size_t i = 0; i < g.restored.size() && i < 3; ++i)
      if (g.restored[i].second > g.after)
        s += fmt::format("  with layer {} in float: {:.2f} %\n", g.restored[i].first, 100 * g.restored[i].second);
    if (g.known_tokens >= 0)
      s += fmt::format("  {:.1f} % of its prompts' tokens occur in the calibration text{}\n", 100 * g.known_tokens,
                       g.known_tokens < kUnknown ? ": the set under-represents this group; add such text" : "");
  }
  return s;
}

Json quality_json(const QualityReport& r, const QualityLimits& limits) {
  Json j;
  j["before"] = eval_json(r.before);
  j["after"] = eval_json(r.after);
  j["answers"] = r.answers;
  j["same_answers"] = r.same;
  j["exceeded"] = quality_failures(r, limits);
  j["groups"] = Json::array();
  for (const GroupQuality& g : r.groups) {
    Json e = {{"group", g.group}, {"before", g.before}, {"after", g.after}, {"lost_points", g.lost_points()}};
    if (g.known_tokens >= 0) e["known_tokens"] = g.known_tokens;
    for (const auto& [layer, accuracy] : g.restored) e["restored"].push_back({{"layer", layer}, {"accuracy", accuracy}});
    j["groups"].push_back(std::move(e));
  }
  return j;
}

}  // namespace mi::tools
