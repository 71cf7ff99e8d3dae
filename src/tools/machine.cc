#include "tools/machine.h"

#include <algorithm>
#include <cstdlib>

#include "base/counted.h"

namespace mi::tools {
namespace {

using kernels::MachineLimits;
using kernels::ProbeRate;

Json rate_json(const ProbeRate& r) { return {{"one", r.one}, {"all", r.all}, {"kernel", r.kernel}}; }

Result<ProbeRate> parse_rate(const Json& j, const std::string& key, const std::string& what) {
  if (!j.contains(key)) return bad_input("{}: {} is missing", what, key);
  ProbeRate r;
  const std::string where = what + ": " + key;
  MI_TRY(r.one, json_get<double>(j[key], "one", where));
  MI_TRY(r.all, json_get<double>(j[key], "all", where));
  MI_TRY(r.kernel, json_get<std::string>(j[key], "kernel", where));
  if (!(r.one > 0) || !(r.all > 0))
    return bad_input("{}: a rate is a positive number, found {} and {}", where, r.one, r.all);
  return r;
}

}  // namespace

Result<Machine> describe_machine(hw::ThreadPool& pool, bool probe) {
  Machine m;
  m.cpu = hw::cpu_model_name();
  m.isa = hw::describe(hw::cpu());
  m.threads = pool.threads();
  if (!probe) return m;
  MI_TRY(m.limits, kernels::probe_machine(pool));
  if (hw::describe(hw::detect_cpu()) != m.isa)
    m.limits->notes.push_back(fmt::format("MI_FORCE_ISA={}: the limits are those of the instructions that it leaves",
                                          std::getenv("MI_FORCE_ISA")));
  return m;
}

Json machine_json(const Machine& m) {
  Json j{{"cpu", m.cpu}, {"isa", m.isa}, {"threads", m.threads}};
  if (!m.limits) return j;
  j["limits"] = {{"read_gbs", rate_json(m.limits->read_gbs)},
                 {"int8_gops", rate_json(m.limits->int8_gops)},
                 {"f32_gflops", rate_json(m.limits->f32_gflops)},
                 {"bf16_gflops", rate_json(m.limits->bf16_gflops)},
                 {"notes", m.limits->notes}};
  return j;
}

Result<Machine> parse_machine(const Json& j, const std::string& what) {
  MI_TRY_VOID(refuse_unknown_keys(j, {"cpu", "isa", "threads", "limits"}, what));
  Machine m;
  MI_TRY(m.cpu, json_get<std::string>(j, "cpu", what));
  MI_TRY(m.isa, json_get<std::string>(j, "isa", what));
  MI_TRY(const int64_t threads, json_get<int64_t>(j, "threads", what));
  m.threads = int(threads);
  if (!j.contains("limits")) return m;
  const Json& l = j["limits"];
  const std::string where = what + ": limits";
  MI_TRY_VOID(refuse_unknown_keys(l, {"read_gbs", "int8_gops", "f32_gflops", "bf16_gflops", "notes"}, where));
  MachineLimits limits;
  limits.threads = m.threads;
  MI_TRY(limits.read_gbs, parse_rate(l, "read_gbs", where));
  MI_TRY(limits.int8_gops, parse_rate(l, "int8_gops", where));
  MI_TRY(limits.f32_gflops, parse_rate(l, "f32_gflops", where));
  limits.bf16_gflops = limits.f32_gflops;
  if (l.contains("bf16_gflops")) {  // not in old files
    MI_TRY(limits.bf16_gflops, parse_rate(l, "bf16_gflops", where));
  }
  MI_TRY(limits.notes, json_get_or<std::vector<std::string>>(l, "notes", {}, where));
  m.limits = limits;
  return m;
}

std::string machine_text(const Machine& m) {
  std::string s = fmt::format("machine  {}, {}, {}\n", m.cpu, counted(m.threads, "thread"), m.isa);
  if (!m.limits) return s + "limits   not measured\n";
  const MachineLimits& l = *m.limits;
  s += fmt::format(
      "limits   read {:.1f} GB/s ({:.1f} with one thread), int8 {:.0f} GOPS ({:.0f}; {}), float {:.0f} GFLOPS ({:.0f}; "
      "{})",
      l.read_gbs.all, l.read_gbs.one, l.int8_gops.all, l.int8_gops.one, l.int8_gops.kernel, l.f32_gflops.all,
      l.f32_gflops.one, l.f32_gflops.kernel);
  if (l.bf16_gflops.kernel != l.f32_gflops.kernel)
    s += fmt::format(", bfloat16 {:.0f} GFLOPS ({:.0f}; {})", l.bf16_gflops.all, l.bf16_gflops.one,
                     l.bf16_gflops.kernel);
  s += '\n';
  for (const std::string& n : l.notes) s += fmt::format("         {}\n", n);
  return s;
}

std::string machine_difference(const Machine& now, const Machine& then) {
  if (now.cpu != then.cpu) return fmt::format("this machine's CPU is '{}', the other's '{}'", now.cpu, then.cpu);
  if (now.isa != then.isa)
    return fmt::format("the instruction sets differ: {} here, {} there (is MI_FORCE_ISA set?)", now.isa, then.isa);
  if (now.threads != then.threads)
    return fmt::format("{} here, {} there: use --threads {}", counted(now.threads, "thread"), then.threads, then.threads);
  if (!now.limits || !then.limits) return {};
  const double a = now.limits->read_gbs.all, b = then.limits->read_gbs.all;
  if (std::max(a, b) > kBandwidthClass * std::min(a, b))
    return fmt::format("memory is read with {:.1f} GB/s here and {:.1f} there: another machine, or one that is busy", a,
                       b);
  return {};
}

LimitShare limit_share(const Machine& m, double bytes, double int8_ops, double float_ops, double seconds,
                       double bf16_ops) {
  if (!m.limits || seconds <= 0) return {};
  const double memory = bytes / (m.limits->read_gbs.all * 1e9);
  const double arithmetic = int8_ops / (m.limits->int8_gops.all * 1e9) + float_ops / (m.limits->f32_gflops.all * 1e9) +
                            bf16_ops / (m.limits->bf16_gflops.all * 1e9);
  if (memory <= 0 && arithmetic <= 0) return {};
  if (memory >= arithmetic) return {Bound::kMemory, memory / seconds};
  return {Bound::kArithmetic, arithmetic / seconds};
}

const char* bound_name(Bound b) {
  return b == Bound::kMemory ? "memory" : b == Bound::kArithmetic ? "arithmetic" : "-";
}

}  // namespace mi::tools
