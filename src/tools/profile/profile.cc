#include "tools/profile/profile.h"

#include <algorithm>
#include <functional>

#include "artifact/reader.h"
#include "base/util.h"
#include "base/version.h"
#include "tools/clock.h"
#include "tools/driver.h"

namespace mi::tools {
namespace {

constexpr uint64_t kSeed = 7;  // one for all rounds: the same ids choose the same experts

struct Plan {
  std::string name;
  bool prefill;
  int64_t prompt, batch, decode;  // decode: steps
};

class Runner {
 public:
  Runner(exec::Engine& engine, const Plan& plan)
      : engine_(engine), plan_(plan), driver_(engine), counter_(engine.manifest()) {}

  Scenario run(int rounds) {
    Scenario s;
    s.name = plan_.name;
    s.prompt = plan_.prompt;
    s.batch = plan_.batch;
    count();
    s.steps = int64_t(shapes_.size());
    std::vector<int64_t> step_tokens;
    for (const StepShape& shape : shapes_) step_tokens.push_back(shape.tokens());
    for (int64_t n : step_tokens) s.tokens += n;
    for (const ExpertCounter::Route& r : counter_.routes()) s.experts.push_back(expert_load(r, step_tokens));
    for (int r = 0; r < rounds; ++r) time_round(&s);
    trace(&s);
    return s;
  }

 private:
  // Everything before the part that is measured.
  void prepare() {
    driver_.start(plan_.batch, plan_.prompt, plan_.decode + 1, kSeed);
    if (!plan_.prefill) driver_.prefill();
  }
  void step() {
    if (plan_.prefill)
      driver_.prefill_step();
    else
      driver_.decode_step();
  }

  // The shapes of the steps and the experts they choose; also the warm-up.
  void count() {
    prepare();
    driver_.before_step = [this](const exec::Batch& b) {
      shapes_.push_back(shape_of(b));
      counter_.begin_step();
    };
    engine_.set_tap(counter_.tap());
    if (plan_.prefill)
      driver_.prefill();
    else
      driver_.decode(plan_.decode);
    engine_.set_tap(nullptr);
    driver_.before_step = nullptr;
  }

  Cost cost_of(size_t instr, size_t step) const {
    const artifact::Instr& i = engine_.manifest().program[instr];
    const ExpertCounter::Route* r = counter_.route_of(i);
    return instr_cost(engine_.manifest(), i, shapes_[step], r ? double(r->distinct(step)) : 0,
                      kv_kind_of(engine_.options().kv_type));
  }

  void time_round(Scenario* s) {
    prepare();
    exec::Timing t;
    engine_.set_timing(&t);
    const auto start = Clock::now();
    for (size_t i = 0; i < shapes_.size(); ++i) step();
    const double all = seconds_since(start);
    engine_.set_timing(nullptr);
    const bool fastest =
        s->round_seconds.empty() || all < *std::min_element(s->round_seconds.begin(), s->round_seconds.end());
    s->round_seconds.push_back(all);
    if (!fastest) return;
    s->seconds = double(t.ns) * 1e-9;
    s->between_seconds = std::max(0.0, all - s->seconds);
    s->instrs.assign(t.instrs.size(), {});
    for (size_t n = 0; n < t.instrs.size(); ++n) {
      InstrStat& stat = s->instrs[n];
      stat.seconds = double(t.instrs[n].ns) * 1e-9;
      stat.calls = t.instrs[n].calls;
      stat.pool_jobs = t.instrs[n].pool_jobs;
      for (size_t i = 0; i < shapes_.size(); ++i) stat.cost += cost_of(n, i);
    }
  }

  void trace(Scenario* s) {
    const size_t middle = shapes_.size() / 2;
    prepare();
    for (size_t i = 0; i < middle; ++i) step();
    exec::Timing t;
    engine_.set_timing(&t);
    step();
    engine_.set_timing(nullptr);
    s->trace.number = int64_t(middle);
    s->trace.seconds = double(t.ns) * 1e-9;
    for (size_t n = 0; n < t.instrs.size(); ++n)
      if (t.instrs[n].calls > 0)
        s->trace.spans.push_back(
            {n, double(t.instrs[n].start_ns) * 1e-9, double(t.instrs[n].ns) * 1e-9, cost_of(n, middle)});
  }

  exec::Engine& engine_;
  const Plan plan_;
  Driver driver_;
  ExpertCounter counter_;
  std::vector<StepShape> shapes_;
};

std::vector<Plan> plans(const ProfileOptions& o) {
  std::vector<Plan> all;
  for (int64_t n : o.prefill) all.push_back({fmt::format("prefill {}", n), true, n, 1, 0});
  for (int64_t b : o.batch) all.push_back({fmt::format("decode, batch {}", b), false, kProfilePrompt, b, o.decode});
  return all;
}

void add_name(std::string* list, const std::string& name) {
  if (("; " + *list + "; ").find("; " + name + "; ") == std::string::npos) *list += (list->empty() ? "" : "; ") + name;
}

// Shares above 1 are told, with what explains them.
void note_shares(const artifact::Manifest& m, Profile* p) {
  const auto above = [&](const Scenario& s) {
    const std::vector<Group> ops = group(*p, s, GroupBy::kOp);
    return std::any_of(ops.begin(), ops.end(), [](const Group& g) { return g.limit.share > 1; });
  };
  if (!p->machine.limits || std::none_of(p->scenarios.begin(), p->scenarios.end(), above)) return;
  const int64_t weights = m.memory.weight_bytes, caches = p->machine.limits->cache_bytes;
  p->notes.push_back(
      caches > weights
          ? fmt::format("shares above 100 %: all weights ({}) fit the caches ({}), whose bandwidth is not the memory's",
                        human_bytes(double(weights)), human_bytes(double(caches)))
          : std::string(
                "shares above 100 %: the machine was slower while its limits were measured, or what a step reads "
                "was still in the caches"));
}

}  // namespace

double Scenario::outside_seconds() const {
  double sum = seconds;
  for (const InstrStat& i : instrs) sum -= i.seconds;
  return std::max(0.0, sum);
}

int64_t profile_kv_tokens(const ProfileOptions& o) {
  int64_t pages = 1;
  for (const Plan& p : plans(o)) pages = std::max(pages, Driver::pages_needed(p.batch, p.prompt + p.decode + 1));
  return pages * artifact::kKvPageTokens;
}

Status check_profile(const Path& engine, const ProfileOptions& o) {
  if (plans(o).empty()) return fail(ErrorCode::kUsage, "nothing to measure: --prefill and --batch are both empty");
  MI_TRY(const artifact::LoadedArtifact a, artifact::open_artifact(engine));
  const int64_t positions = a.manifest.model.max_positions;
  for (const Plan& p : plans(o)) {
    if (p.prompt < 1 || p.batch < 1 || (!p.prefill && p.decode < 1))
      return fail(ErrorCode::kUsage, "{}: too small to measure", p.name);
    const int64_t length = p.prompt + p.decode + 1;
    if (positions > 0 && length > positions)
      return fail(ErrorCode::kUsage, "{}: sequences of {} tokens, the model has {} positions", p.name, length,
                  positions);
  }
  return {};
}

Profile run_profile(exec::Engine& engine, const Machine& machine, const ProfileOptions& o) {
  const artifact::Manifest& m = engine.manifest();
  Profile profile;
  profile.version = std::string("metainfer ") + version();
  profile.engine = m.model.name;
  profile.precision = m.model.precision;
  profile.kv_type = engine.options().kv_type;
  profile.machine = machine;
  for (size_t n = 0; n < m.program.size(); ++n) {
    const exec::KernelChoice k = engine.kernel_choice(n);
    profile.program.push_back(
        {std::string(op_name(m.program[n].op)), m.program[n].name, k.kernel, k.why, m.program[n].layer});
  }
  for (const Plan& p : plans(o)) profile.scenarios.push_back(Runner(engine, p).run(o.rounds));
  note_shares(m, &profile);
  return profile;
}

std::vector<Group> group(const Profile& p, const Scenario& s, GroupBy by) {
  std::vector<Group> groups;
  for (size_t n = 0; n < s.instrs.size(); ++n) {
    if (s.instrs[n].calls == 0) continue;
    const InstrInfo& i = p.program[n];
    std::string name = i.op;
    if (by == GroupBy::kName) name += " " + i.name;
    if (by == GroupBy::kLayer) name = i.layer < 0 ? "before and after the layers" : fmt::format("layer {}", i.layer);
    auto g = std::find_if(groups.begin(), groups.end(), [&](const Group& x) { return x.name == name; });
    if (g == groups.end()) g = groups.insert(groups.end(), {name, {}, {}, {}, 0});
    if (by != GroupBy::kLayer) add_name(&g->kernel, i.kernel);
    g->sum.seconds += s.instrs[n].seconds;
    g->sum.calls += s.instrs[n].calls;
    g->sum.pool_jobs += s.instrs[n].pool_jobs;
    g->sum.cost += s.instrs[n].cost;
  }
  for (Group& g : groups) {
    g.limit = limit_share(p.machine, g.sum.cost.bytes(), g.sum.cost.int8_ops, g.sum.cost.float_ops, g.sum.seconds, g.sum.cost.bf16_ops);
    g.share = s.seconds > 0 ? g.sum.seconds / s.seconds : 0;
  }
  if (by != GroupBy::kLayer)
    std::stable_sort(groups.begin(), groups.end(),
                     [](const Group& a, const Group& b) { return a.sum.seconds > b.sum.seconds; });
  return groups;
}

std::vector<KernelUse> kernels_used(const Profile& p) {
  std::vector<KernelUse> all;
  for (const InstrInfo& i : p.program) {
    auto k = std::find_if(all.begin(), all.end(),
                          [&](const KernelUse& u) { return u.kernel == i.kernel && u.why == i.why; });
    if (k == all.end()) k = all.insert(all.end(), {i.kernel, {}, i.why});
    add_name(&k->ops, i.op);
  }
  return all;
}

}  // namespace mi::tools
