#include <algorithm>

#include "base/counted.h"
#include "base/util.h"
#include "tools/profile/report.h"

namespace mi::tools {
namespace {

std::string rate(double amount, double seconds) {
  return seconds > 0 && amount > 0 ? fmt::format("{:.1f}", amount / seconds / 1e9) : "-";
}

std::string header(const char* first) {
  return fmt::format("  {:<34} {:>10} {:>7} {:>7} {:>7} {:>10} {:>10} {:>10} {:>7} {:>8}  {}\n", first, "time/step",
                     "share", "calls", "jobs", "weights", "KV", "Mops", "GB/s", "GOPS", "of the limit");
}

std::string line(const Group& g, const Scenario& s) {
  const double steps = double(s.steps);
  const auto bytes = [&](double b) { return b > 0 ? human_bytes(b / steps) : std::string("-"); };
  const std::string limit = g.limit.bound == Bound::kNone
                                ? "-"
                                : fmt::format("{:.0f} % of {}", 100 * g.limit.share, bound_name(g.limit.bound));
  return fmt::format("  {:<34} {:>10} {:>6.1f}% {:>7.4g} {:>7.4g} {:>10} {:>10} {:>10.4g} {:>7} {:>8}  {}\n", g.name,
                     step_time(g.sum.seconds / steps), 100 * g.share, double(g.sum.calls) / steps,
                     double(g.sum.pool_jobs) / steps, bytes(g.sum.cost.weight_bytes), bytes(g.sum.cost.kv_bytes),
                     g.sum.cost.ops() / steps / 1e6, rate(g.sum.cost.bytes(), g.sum.seconds),
                     rate(g.sum.cost.ops(), g.sum.seconds), limit);
}

std::string time_line(const char* name, double seconds, const Scenario& s) {
  return fmt::format("  {:<34} {:>10} {:>6.1f}%\n", name, step_time(seconds / double(s.steps)),
                     s.seconds > 0 ? 100 * seconds / s.seconds : 0);
}

std::string scenario_text(const Profile& p, const Scenario& s, size_t top) {
  const double all = s.seconds + s.between_seconds;
  const auto [low, high] = std::minmax_element(s.round_seconds.begin(), s.round_seconds.end());
  int64_t calls = 0, jobs = 0;
  for (const InstrStat& i : s.instrs) {
    calls += i.calls;
    jobs += i.pool_jobs;
  }
  std::string out = fmt::format(
      "\n{}: {} of {}, {:.1f} tok/s; {:.4g} kernel calls and {:.4g} pool jobs per step; the fastest of {} ({} - {})\n",
      s.name, counted(s.steps, "step"), step_time(all / double(s.steps)), double(s.tokens) / all,
      double(calls) / double(s.steps), double(jobs) / double(s.steps), counted(int64_t(s.round_seconds.size()), "round"),
      step_time(*low), step_time(*high));
  out += header("by operation");
  for (const Group& g : group(p, s, GroupBy::kOp)) out += line(g, s);
  out += time_line("outside instructions", s.outside_seconds(), s);
  out += time_line("between steps (choosing tokens)", s.between_seconds, s);
  const std::vector<Group> names = group(p, s, GroupBy::kName);
  out += header(fmt::format("by instruction, {} of {}", std::min(top, names.size()), names.size()).c_str());
  for (size_t i = 0; i < std::min(top, names.size()); ++i) out += line(names[i], s);
  out += header("by layer");
  for (const Group& g : group(p, s, GroupBy::kLayer)) out += line(g, s);
  if (s.experts.empty()) return out;
  out += fmt::format("  {:<10} {:>22} {:>12} {:>9}  {}\n", "experts", "different, per step", "(if even)", "busiest",
                     "tokens per expert");
  for (const ExpertLoad& e : s.experts)
    out += fmt::format("  {:<10} {:>22} {:>12.1f} {:>8.2f}x  {}\n", fmt::format("layer {}", e.layer),
                       fmt::format("{:.1f} of {}", e.distinct_per_step, e.experts), e.even_distinct, e.skew,
                       sparkline(e.tokens, 64));
  return out;
}

}  // namespace

std::string sparkline(const std::vector<int64_t>& values, size_t width) {
  static constexpr const char* kHeights[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  const size_t parts = std::min(width, values.size());
  std::vector<double> sums(parts, 0);
  for (size_t i = 0; i < values.size(); ++i) {
    const size_t part = i * parts / values.size();
    const size_t first = (part * values.size() + parts - 1) / parts,
                 last = ((part + 1) * values.size() + parts - 1) / parts;
    sums[part] += double(values[i]) / double(last - first);
  }
  const double top = parts ? *std::max_element(sums.begin(), sums.end()) : 0;
  std::string s;
  for (double v : sums) s += v <= 0 ? "·" : kHeights[std::min<size_t>(7, size_t(v / top * 8))];
  return s;
}

std::string step_time(double seconds) {
  if (seconds >= 1) return fmt::format("{:.2f} s", seconds);
  return seconds >= 1e-3 ? fmt::format("{:.2f} ms", seconds * 1e3) : fmt::format("{:.1f} us", seconds * 1e6);
}

std::string profile_text(const Profile& p, size_t top) {
  std::string out =
      fmt::format("engine   {} ({}), KV {}\n{}", p.engine, p.precision, p.kv_type, machine_text(p.machine));
  for (const Scenario& s : p.scenarios) out += scenario_text(p, s, top);
  for (const std::string& n : p.notes) out += "\n" + n + "\n";
  out += "\nkernels\n";
  for (const KernelUse& k : kernels_used(p)) out += fmt::format("  {}: {}\n    why: {}\n", k.kernel, k.ops, k.why);
  if (p.memory) out += memory_text(*p.memory);
  return out;
}

}  // namespace mi::tools
