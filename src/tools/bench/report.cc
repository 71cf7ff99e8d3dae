#include "tools/bench/report.h"

#include <algorithm>

#include "base/util.h"

namespace mi::tools {

Json bench_json(const BenchRow& r, const BenchShare* share) {
  const std::vector<double> speed = r.values(&BenchRound::tok_s);
  const auto [low, high] = std::minmax_element(speed.begin(), speed.end());
  Json j{{"metric", r.metric},
         {"n", r.n},
         {"tok_s", r.middle(&BenchRound::tok_s)},
         {"ttft_s", r.middle(&BenchRound::ttft_s)},
         {"tok_s_min", *low},
         {"tok_s_max", *high}};
  if (r.metric != "prefill") j["total_tok_s"] = r.middle(&BenchRound::total_tok_s);
  j["tok_s_rounds"] = speed;
  j["ttft_s_rounds"] = r.values(&BenchRound::ttft_s);
  if (!share) return j;
  if (share->gbs > 0) j["gbs"] = share->gbs;
  j["gops"] = share->gops;
  if (share->limit.bound == Bound::kNone) return j;
  j["bound"] = bound_name(share->limit.bound);
  j["share"] = share->limit.share;
  return j;
}

std::string bench_table(const std::vector<BenchRow>& rows, const std::vector<BenchShare>& shares) {
  std::string s = fmt::format("{:<14} {:>12} {:>21} {:>12} {:>8} {:>8} {:>22}\n", "", "tok/s", "[min - max]",
                              "first token", "GB/s", "GOPS", "of the limit");
  bool above = false;
  for (size_t i = 0; i < rows.size(); ++i) {
    const std::vector<double> speed = rows[i].values(&BenchRound::tok_s);
    const auto [low, high] = std::minmax_element(speed.begin(), speed.end());
    std::string gbs = "-", gops = "-", share = "-";
    if (i < shares.size()) {
      if (shares[i].gbs > 0) gbs = fmt::format("{:.1f}", shares[i].gbs);
      gops = fmt::format("{:.1f}", shares[i].gops);
      if (shares[i].limit.bound != Bound::kNone)
        share = fmt::format("{:.0f} % of {}", 100 * shares[i].limit.share, bound_name(shares[i].limit.bound));
      above |= shares[i].limit.share > 1;
    }
    s += fmt::format("{:<14} {:>12.1f} {:>21} {:>12} {:>8} {:>8} {:>22}\n",
                     fmt::format("{} {}", rows[i].metric, rows[i].n), rows[i].middle(&BenchRound::tok_s),
                     fmt::format("[{:.1f} - {:.1f}]", *low, *high), human_seconds(rows[i].middle(&BenchRound::ttft_s)),
                     gbs, gops, share);
  }
  if (above)
    s += "more than the limit: weights that fit the caches, or a machine that was slower while its limits were "
         "measured\n";
  return s;
}

}  // namespace mi::tools
