#include "base/counted.h"
#include "base/html.h"

#include <algorithm>

#include "base/util.h"
#include "tools/plot.h"
#include "tools/profile/report.h"

namespace mi::tools {
namespace {

using html::escape;

std::string percent(double share) { return fmt::format("{:.1f} %", 100 * share); }
std::string limit_text(const LimitShare& l) {
  return l.bound == Bound::kNone ? "-" : fmt::format("{:.0f} % of {}", 100 * l.share, bound_name(l.bound));
}

std::string group_table(const char* first, const std::vector<Group>& groups, const Scenario& s) {
  std::vector<std::vector<std::string>> rows{{first, "time per step", "share", "calls", "pool jobs", "weights", "KV",
                                              "Mops", "GB/s", "GOPS", "of the limit", "kernel"}};
  const double steps = double(s.steps);
  for (const Group& g : groups) {
    const InstrStat& x = g.sum;
    rows.push_back(
        {g.name, step_time(x.seconds / steps), percent(g.share), fmt::format("{:.4g}", double(x.calls) / steps),
         fmt::format("{:.4g}", double(x.pool_jobs) / steps), human_bytes(x.cost.weight_bytes / steps),
         human_bytes(x.cost.kv_bytes / steps), fmt::format("{:.4g}", x.cost.ops() / steps / 1e6),
         fmt::format("{:.1f}", x.seconds > 0 ? x.cost.bytes() / x.seconds / 1e9 : 0),
         fmt::format("{:.1f}", x.seconds > 0 ? x.cost.ops() / x.seconds / 1e9 : 0), limit_text(g.limit), g.kernel});
  }
  return html::table(rows);
}

std::string time_bars(const std::vector<Group>& ops, const Scenario& s) {
  std::vector<PlotBar> bars;
  const auto add = [&](const std::string& name, double seconds, const std::string& more) {
    const std::string time = step_time(seconds / double(s.steps));
    bars.push_back({name, fmt::format("{}, {}", time, percent(s.seconds > 0 ? seconds / s.seconds : 0)),
                    fmt::format("{}: {} per step{}", name, time, more), seconds});
  };
  for (const Group& g : ops) add(g.name, g.sum.seconds, fmt::format(", {}", limit_text(g.limit)));
  add("outside instructions", s.outside_seconds(), "");
  add("between steps", s.between_seconds, "");
  return bar_plot(bars, s.name + ": time by operation");
}

std::string roofline(const Profile& p, const std::vector<Group>& ops, const Scenario& s) {
  if (!p.machine.limits) return "<p>No roofline: the machine's limits were not measured.</p>\n";
  std::vector<RooflinePoint> points;
  for (const Group& g : ops) {
    const double bytes = g.sum.cost.bytes();
    if (bytes <= 0 || g.sum.seconds <= 0) continue;
    points.push_back(
        {g.name,
         fmt::format("{}: {:.1f} GOPS, {:.1f} GB/s, {} of the time, {}", g.name, g.sum.cost.ops() / g.sum.seconds / 1e9,
                     bytes / g.sum.seconds / 1e9, percent(g.share), limit_text(g.limit)),
         g.sum.cost.ops() / bytes, g.sum.cost.ops() / g.sum.seconds / 1e9, g.share});
  }
  return roofline_plot(points, p.machine.limits->int8_gops.all, p.machine.limits->read_gbs.all, s.name + ": roofline") +
         fmt::format(
             "<p>The roof is the read bandwidth and the int8 rate; the float rate is {:.0f} GFLOPS. The larger a mark, "
             "the more of the time.</p>\n",
             p.machine.limits->f32_gflops.all);
}

std::string step_picture(const Profile& p, const Scenario& s) {
  std::vector<PlotSpan> spans;
  for (const TracedStep::Span& t : s.trace.spans) {
    const InstrInfo& i = p.program[t.instr];
    spans.push_back({i.op,
                     fmt::format("{} {}{}: {}", i.op, i.name, i.layer < 0 ? "" : fmt::format(", layer {}", i.layer),
                                 step_time(t.seconds)),
                     t.begin, t.begin + t.seconds});
  }
  return span_plot(spans, s.trace.seconds,
                   fmt::format("{}: step {}, {}", s.name, s.trace.number + 1, step_time(s.trace.seconds)));
}

std::string expert_part(const Scenario& s) {
  if (s.experts.empty()) return {};
  std::vector<PlotRow> rows;
  std::vector<std::vector<std::string>> table{
      {"layer", "different experts per step", "if all were equally likely", "busiest expert over the mean"}};
  for (const ExpertLoad& e : s.experts) {
    rows.push_back({fmt::format("layer {}", e.layer), {e.tokens.begin(), e.tokens.end()}});
    table.push_back({fmt::format("{}", e.layer), fmt::format("{:.1f} of {}", e.distinct_per_step, e.experts),
                     fmt::format("{:.1f}", e.even_distinct), fmt::format("{:.2f}", e.skew)});
  }
  return "<h3>Tokens per expert</h3>\n" + heat_plot(rows, s.name + ": tokens per expert") + html::table(table);
}

std::string scenario_part(const Profile& p, const Scenario& s) {
  const std::vector<Group> ops = group(p, s, GroupBy::kOp);
  const double all = s.seconds + s.between_seconds;
  std::string out =
      fmt::format("<h2>{}</h2>\n<p>{} of {}, {:.1f} tok/s. The fastest of {}.</p>\n", escape(s.name),
                  counted(s.steps, "step"), step_time(all / double(s.steps)), double(s.tokens) / all,
                  counted(int64_t(s.round_seconds.size()), "round"));
  out += "<h3>Time by operation</h3>\n" + time_bars(ops, s) + group_table("operation", ops, s);
  out += "<h3>Roofline</h3>\n" + roofline(p, ops, s);
  out += fmt::format("<h3>Step {}</h3>\n<p>Left to right; colours as above.</p>\n", s.trace.number + 1) +
         step_picture(p, s);
  out += "<h3>By layer</h3>\n" + group_table("layer", group(p, s, GroupBy::kLayer), s);
  out += expert_part(s);
  out += "<h3>By instruction</h3>\n" + group_table("instruction, all layers", group(p, s, GroupBy::kName), s);
  return out;
}

}  // namespace

std::string profile_html(const Profile& p) {
  std::string body = fmt::format("<p>{} ({}), KV {}; {}</p>\n<pre>{}</pre>\n", escape(p.engine), escape(p.precision),
                                 escape(p.kv_type), escape(p.version), escape(machine_text(p.machine)));
  for (const std::string& n : p.notes) body += "<p>" + escape(n) + "</p>\n";
  for (const Scenario& s : p.scenarios) body += scenario_part(p, s);
  std::vector<std::vector<std::string>> kernels{{"kernel", "operations", "why"}};
  for (const KernelUse& k : kernels_used(p)) kernels.push_back({k.kernel, k.ops, k.why});
  body += "<h2>Kernels</h2>\n" + html::table(kernels);
  if (p.memory) body += "<h2>Memory</h2>\n" + memory_plot(*p.memory) + "<pre>" + escape(memory_text(*p.memory)) + "</pre>\n";
  return html::page(p.engine + ": profile", body);
}

}  // namespace mi::tools
