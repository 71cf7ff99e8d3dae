#include "tools/profile/report.h"

namespace mi::tools {
namespace {

Json cost_json(const Cost& c) {
  return {{"weight_bytes", c.weight_bytes},
          {"kv_bytes", c.kv_bytes},
          {"int8_ops", c.int8_ops},
          {"float_ops", c.float_ops},
          {"bf16_ops", c.bf16_ops}};
}

// Sums over all steps of the scenario.
Json stat_json(const InstrStat& s) {
  Json j{{"seconds", s.seconds}, {"calls", s.calls}, {"pool_jobs", s.pool_jobs}};
  j.update(cost_json(s.cost));
  j["gbs"] = s.seconds > 0 ? s.cost.bytes() / s.seconds / 1e9 : 0;
  j["gops"] = s.seconds > 0 ? s.cost.ops() / s.seconds / 1e9 : 0;
  return j;
}

void add_limit(const LimitShare& l, Json* j) {
  (*j)["bound"] = l.bound == Bound::kNone ? Json(nullptr) : Json(bound_name(l.bound));
  (*j)["of_limit"] = l.bound == Bound::kNone ? Json(nullptr) : Json(l.share);
}

Json groups_json(const Profile& p, const Scenario& s, GroupBy by) {
  Json all = Json::array();
  for (const Group& g : group(p, s, by)) {
    Json j{{"name", g.name}, {"share", g.share}};
    j.update(stat_json(g.sum));
    add_limit(g.limit, &j);
    if (!g.kernel.empty()) j["kernel"] = g.kernel;
    all.push_back(std::move(j));
  }
  return all;
}

Json scenario_json(const Profile& p, const Scenario& s) {
  const double all = s.seconds + s.between_seconds;
  Json j{{"name", s.name},
         {"prompt", s.prompt},
         {"batch", s.batch},
         {"steps", s.steps},
         {"tokens", s.tokens},
         {"tok_s", double(s.tokens) / all},
         {"seconds", s.seconds},
         {"outside_seconds", s.outside_seconds()},
         {"between_seconds", s.between_seconds},
         {"round_seconds", s.round_seconds}};
  int64_t calls = 0, jobs = 0;
  for (const InstrStat& i : s.instrs) {
    calls += i.calls;
    jobs += i.pool_jobs;
  }
  j["calls_per_step"] = double(calls) / double(s.steps);
  j["pool_jobs_per_step"] = double(jobs) / double(s.steps);
  j["ops"] = groups_json(p, s, GroupBy::kOp);
  j["layers"] = groups_json(p, s, GroupBy::kLayer);
  j["instructions"] = Json::array();
  for (size_t n = 0; n < s.instrs.size(); ++n) {
    const InstrStat& i = s.instrs[n];
    Json x{{"index", n},
           {"op", p.program[n].op},
           {"name", p.program[n].name},
           {"layer", p.program[n].layer},
           {"kernel", p.program[n].kernel}};
    x.update(stat_json(i));
    add_limit(limit_share(p.machine, i.cost.bytes(), i.cost.int8_ops, i.cost.float_ops, i.seconds, i.cost.bf16_ops), &x);
    j["instructions"].push_back(std::move(x));
  }
  j["experts"] = Json::array();
  for (const ExpertLoad& e : s.experts)
    j["experts"].push_back({{"layer", e.layer},
                            {"experts", e.experts},
                            {"k", e.k},
                            {"distinct_per_step", e.distinct_per_step},
                            {"even_distinct", e.even_distinct},
                            {"skew", e.skew},
                            {"tokens", e.tokens}});
  return j;
}

}  // namespace

Json profile_json(const Profile& p) {
  Json j{{"version", p.version},
         {"engine", {{"name", p.engine}, {"precision", p.precision}, {"kv_type", p.kv_type}}},
         {"machine", machine_json(p.machine)}};
  j["kernels"] = Json::array();
  for (const KernelUse& k : kernels_used(p))
    j["kernels"].push_back({{"kernel", k.kernel}, {"ops", k.ops}, {"why", k.why}});
  j["scenarios"] = Json::array();
  for (const Scenario& s : p.scenarios) j["scenarios"].push_back(scenario_json(p, s));
  j["notes"] = p.notes;
  if (p.memory) j["memory"] = memory_json(*p.memory);
  return j;
}

}  // namespace mi::tools
