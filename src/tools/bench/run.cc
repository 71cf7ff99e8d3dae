#include "tools/bench/run.h"

#include "artifact/reader.h"
#include "base/util.h"
#include "base/version.h"
#include "hw/process_memory.h"
#include "tools/clock.h"
#include "tools/session.h"

namespace mi::tools {
namespace {

int thread_count(const BenchOptions& o) {
  return o.session.threads > 0 ? o.session.threads : hw::advise_threads().threads;
}

// The engine's description, with what is refused before the machine is measured and weights are read.
Result<artifact::Manifest> describe(const BenchOptions& o) {
  MI_TRY(artifact::LoadedArtifact a, artifact::open_artifact(o.session.engine));
  exec::LoadOptions l;
  l.kv_type = o.session.kv_type;
  l.attention_order = o.session.attention_order;
  MI_TRY_VOID(exec::check_options(l, a.manifest));
  return std::move(a.manifest);
}

Result<Machine> probe(const BenchOptions& o) {
  hw::ThreadPool pool(thread_count(o));
  return describe_machine(pool, o.probe);
}

// One KV pool of `tokens` that every measurement fits into.
Result<Session> open(const BenchOptions& o, int64_t tokens, double* load_s) {
  SessionOptions so = o.session;
  so.threads = thread_count(o);
  so.max_batch_size = 1;
  so.kv_tokens = tokens;
  so.kv_measured = true;
  const auto start = Clock::now();
  MI_TRY(Session s, open_session(so));
  *load_s = seconds_since(start);
  return s;
}

std::string own_version() { return std::string("metainfer ") + version(); }

Result<BenchRecord> begin_record(const BenchOptions& o, const Machine& machine, const artifact::Manifest& m,
                                 const exec::LoadOptions& load) {
  BenchRecord r;
  r.version = own_version();
  r.when = utc_now();
  r.machine = machine;
  MI_TRY(r.engine, identify_engine(o.session.engine, m));
  r.settings = {o.cases, load.kv_type, load.attention_order, load.max_tokens_per_step, load.expert_cache_bytes};
  if (o.before_measuring) MI_TRY_VOID(o.before_measuring(r));
  return r;
}

void add_rows(const artifact::Manifest& m, std::vector<BenchRow> rows, BenchRecord* r) {
  r->rows = std::move(rows);
  for (const BenchRow& row : r->rows) r->shares.push_back(bench_share(m, r->machine, row));
}

}  // namespace

Result<BenchOutcome> run_bench(const BenchOptions& o) {
  BenchOutcome out;
  MI_TRY(const artifact::Manifest described, describe(o));
  MI_TRY_VOID(check_cases(o.cases, described.model.max_positions));
  MI_TRY(const Machine machine, probe(o));
  const bool fresh_peak = hw::reset_peak_memory();
  const auto before = hw::process_memory();
  double load_s = 0;
  MI_TRY(const Session s, open(o, bench_kv_tokens(o.cases), &load_s));
  MI_TRY(out.record, begin_record(o, machine, s.engine->manifest(), s.engine->options()));
  out.record.load_s = load_s;
  add_rows(s.engine->manifest(), measure(*s.engine, o.cases, o.rounds), &out.record);
  if (const auto stream = s.engine->stream_stats()) out.notes.push_back(stream_text(*stream));
  const auto after = hw::process_memory();
  if (!after.ok())
    out.notes.push_back("memory peak: " + after.error().message());
  else if (o.probe && !fresh_peak && before.ok() && after->peak <= before->peak)
    out.notes.push_back(
        fmt::format("memory peak: hidden behind the {} that measuring the limits took; --no-probe shows it",
                    human_bytes(double(before->peak))));
  else
    out.record.peak_bytes = after->peak;
  return out;
}

Result<SweepOutcome> run_bench_sweep(const BenchOptions& o) {
  SweepOutcome out;
  SweepAxes axes;
  axes.rounds = o.rounds;
  MI_TRY(const artifact::Manifest described, describe(o));
  MI_TRY_VOID(check_sweep(axes, described.model.max_positions));
  MI_TRY(out.machine, probe(o));
  MI_TRY(const Session s, open(o, sweep_kv_tokens(axes), &out.load_s));
  out.cells = run_sweep(*s.engine, axes);
  return out;
}

Result<AgainstOutcome> run_bench_against(const BenchOptions& o, const Path& program, const Path& their_engine,
                                         const std::function<void(int)>& after_round) {
  AgainstOutcome out;
  MI_TRY(const artifact::Manifest engine, describe(o));
  MI_TRY_VOID(check_cases(o.cases, engine.model.max_positions));
  MI_TRY(const Machine machine, probe(o));
  exec::LoadOptions load;
  load.kv_type = o.session.kv_type.empty() ? engine.default_kv : o.session.kv_type;
  load.attention_order.clear();  // nothing is loaded here
  load.max_tokens_per_step = exec::step_tokens(engine.memory.activation_bytes_per_token);
  MI_TRY(out.bench.record, begin_record(o, machine, engine, load));
  AgainstOptions a;
  std::error_code ec;
  a.ours = std::filesystem::read_symlink("/proc/self/exe", ec);
  if (ec) return fail(ErrorCode::kEnvironment, "/proc/self/exe cannot be read: {}", ec.message());
  a.theirs = program;
  a.session = o.session;
  a.session.threads = thread_count(o);
  a.their_engine = their_engine.empty() ? o.session.engine : their_engine;
  a.cases = o.cases;
  a.rounds = o.rounds;
  MI_TRY(AgainstResult r, run_against(a, after_round));
  add_rows(engine, std::move(r.ours), &out.bench.record);
  out.bench.record.load_s = r.load_s;
  out.bench.record.peak_bytes = r.peak_bytes;
  if (!r.peak_bytes) out.bench.notes.push_back("memory peak: the measured processes could not tell it");
  out.theirs = std::move(r.theirs);
  out.their_version = r.their_version;
  return out;
}

}  // namespace mi::tools
