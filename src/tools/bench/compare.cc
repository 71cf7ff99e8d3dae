#include "tools/bench/compare.h"

#include <algorithm>

#include "base/counted.h"
#include "base/util.h"

namespace mi::tools {
namespace {

// The figures of a row that are judged: a prompt's speed is its time to the first token already.
struct Figure {
  const char* unit;
  double BenchRound::*field;
  bool more_is_better;
};
std::vector<Figure> figures(const BenchRow& r) {
  std::vector<Figure> f{{"tok/s", &BenchRound::tok_s, true}};
  if (r.metric != "prefill") f.push_back({"first token, s", &BenchRound::ttft_s, false});
  return f;
}

// A seed of its own for each figure: adding one leaves the others' intervals as they were.
template <typename Ratio>
void judge(const BenchRow& now, const BenchRow& then, const CompareOptions& o, Comparison* c, Ratio ratio) {
  for (const Figure& f : figures(now)) {
    CompareRow row;
    row.figure = fmt::format("{} {} {}", now.metric, now.n, f.unit);
    const std::vector<double> a = now.values(f.field), b = then.values(f.field);
    row.now = median(a);
    row.then = median(b);
    row.ratio = f.more_is_better ? ratio(a, b, seed_of(o.seed, row.figure)) : ratio(b, a, seed_of(o.seed, row.figure));
    row.regressed = row.ratio.high < 1 - o.threshold;
    c->rows.push_back(row);
  }
}

// As a shell takes it.
std::string list_text(const std::vector<int64_t>& v) { return v.empty() ? "''" : fmt::format("{}", fmt::join(v, ",")); }

std::string settings_difference(const BenchSettings& a, const BenchSettings& b) {
  const std::pair<const char*, std::vector<int64_t> BenchCases::*> lists[] = {
      {"prefill", &BenchCases::prefill}, {"decode", &BenchCases::decode}, {"batch", &BenchCases::batch}};
  for (const auto& [name, field] : lists)
    if (a.cases.*field != b.cases.*field)
      return fmt::format("--{} is {} here and {} there: use --{} {}", name, list_text(a.cases.*field),
                         list_text(b.cases.*field), name, list_text(b.cases.*field));
  if (a.kv_type != b.kv_type)
    return fmt::format("the KV cache is {} here and {} there: use --kv-type {}", a.kv_type, b.kv_type, b.kv_type);
  if (a.attention_order != b.attention_order && !a.attention_order.empty() && !b.attention_order.empty())
    return fmt::format("attention adds {} here and {} there: use --attention-order {}", a.attention_order, b.attention_order,
                       b.attention_order);
  if (a.expert_cache_bytes != b.expert_cache_bytes)
    return fmt::format("the expert cache is {} here and {} there (0: all experts in memory): use the same --expert-cache",
                       human_bytes(double(a.expert_cache_bytes)), human_bytes(double(b.expert_cache_bytes)));
  if (a.max_tokens_per_step != b.max_tokens_per_step)
    return fmt::format("steps hold up to {} tokens here and {} there: save a new baseline", a.max_tokens_per_step,
                       b.max_tokens_per_step);
  return {};
}

}  // namespace

bool Comparison::regressed() const {
  return std::any_of(rows.begin(), rows.end(), [](const CompareRow& r) { return r.regressed; });
}

Status check_comparable(const BenchRecord& now, const BenchRecord& then, const std::string& with,
                        const CompareOptions& o) {
  if (const std::string d = machine_difference(now.machine, then.machine); !d.empty())
    return fail(
        ErrorCode::kEnvironment,
        "{} cannot be compared with: {}; save a baseline on this machine, or use --against with the other program",
        with, d);
  if (now.engine != then.engine && !o.other_engine)
    return fail(ErrorCode::kUsage,
                "{} cannot be compared with: it was measured on another engine ({}, {}, checksum {}; this one is {}, "
                "{}, checksum {}); "
                "--other-engine compares all the same, for a model that was built anew",
                with, then.engine.name, then.engine.precision, then.engine.checksum, now.engine.name,
                now.engine.precision, now.engine.checksum);
  if (const std::string d = settings_difference(now.settings, then.settings); !d.empty())
    return fail(ErrorCode::kUsage, "{} cannot be compared with: {}", with, d);
  for (const BenchRow& row : then.rows)
    if (row.rounds.size() < size_t(kFewestRounds))
      return fail(ErrorCode::kUsage,
                  "{} cannot be compared with: {} {} was measured in {}, at least {} are needed", with, row.metric, row.n,
                  counted(int64_t(row.rounds.size()), "round"), kFewestRounds);
  return {};
}

Result<Comparison> compare_records(const BenchRecord& now, const BenchRecord& then, const std::string& with,
                                   const CompareOptions& o) {
  MI_TRY_VOID(check_comparable(now, then, with, o));
  Comparison c;
  c.with = with;
  c.threshold = o.threshold;
  for (const BenchRow& row : now.rows) {
    const auto same = std::find_if(then.rows.begin(), then.rows.end(),
                                   [&](const BenchRow& t) { return t.metric == row.metric && t.n == row.n; });
    if (same == then.rows.end())
      return bad_input("{}: {} {} is missing although the settings name it", with, row.metric, row.n);
    judge(row, *same, o, &c,
          [&](const auto& a, const auto& b, uint64_t seed) { return bootstrap_ratio(a, b, o.confidence, seed); });
  }
  if (now.peak_bytes && then.peak_bytes) {
    const double ratio = double(*then.peak_bytes) / double(*now.peak_bytes);
    c.rows.push_back({"memory peak, MB",
                      double(*now.peak_bytes) / 1e6,
                      double(*then.peak_bytes) / 1e6,
                      {ratio, ratio, ratio},
                      ratio < 1 - o.threshold});
  }
  return c;
}

Comparison compare_rounds(const std::vector<BenchRow>& now, const std::vector<BenchRow>& then, const std::string& with,
                          const CompareOptions& o) {
  MI_CHECK_EQ(now.size(), then.size());
  Comparison c;
  c.with = with;
  c.threshold = o.threshold;
  for (size_t i = 0; i < now.size(); ++i) {
    MI_CHECK(now[i].metric == then[i].metric && now[i].n == then[i].n && now[i].rounds.size() == then[i].rounds.size(),
             "{} {}", now[i].metric, now[i].n);
    judge(now[i], then[i], o, &c, [&](const std::vector<double>& a, const std::vector<double>& b, uint64_t seed) {
      std::vector<double> ratios;
      for (size_t r = 0; r < a.size(); ++r) ratios.push_back(a[r] / b[r]);
      return bootstrap_median(ratios, o.confidence, seed);
    });
  }
  return c;
}

std::string comparison_text(const Comparison& c) {
  std::string s = fmt::format("\ncompared with {}\n{:<28} {:>12} {:>12} {:>8} {:>18}\n", c.with, "", "now", "then",
                              "ratio", "[95 % interval]");
  for (const CompareRow& r : c.rows)
    s += fmt::format("{:<28} {:>12.4g} {:>12.4g} {:>8.3f} {:>18}{}\n", r.figure, r.now, r.then, r.ratio.mid,
                     fmt::format("[{:.3f} - {:.3f}]", r.ratio.low, r.ratio.high), r.regressed ? "  REGRESSION" : "");
  if (c.regressed()) return s + fmt::format("regression: surely more than {:.0f} % worse\n", 100 * c.threshold);
  return s + fmt::format("no regression of more than {:.0f} % is certain\n", 100 * c.threshold);
}

Json comparison_json(const Comparison& c) {
  Json rows = Json::array();
  for (const CompareRow& r : c.rows)
    rows.push_back({{"figure", r.figure},
                    {"now", r.now},
                    {"then", r.then},
                    {"ratio", r.ratio.mid},
                    {"low", r.ratio.low},
                    {"high", r.ratio.high},
                    {"regressed", r.regressed}});
  return {{"compare", {{"with", c.with}, {"threshold", c.threshold}, {"regressed", c.regressed()}, {"rows", rows}}}};
}

}  // namespace mi::tools
