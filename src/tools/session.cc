#include "tools/session.h"

#include <gnu/libc-version.h>

#include <algorithm>

#include "artifact/reader.h"
#include "base/counted.h"
#include "base/util.h"
#include "hw/memory.h"
#include "hw/numa.h"
#include "hw/process_memory.h"
#include "runtime/stepper.h"
#include "tools/fit.h"
#include "tools/profile/expert_profile.h"

namespace mi::tools {

namespace {

// How many pages of keys and values, before anything large is loaded: the plan has to fit what is available, so that
// nothing which happens later runs out of memory.
Status plan(const SessionOptions& o, int threads, exec::LoadOptions* l, Session* s) {
  MI_TRY(const artifact::LoadedArtifact a, artifact::open_artifact(o.engine));
  const int64_t positions = a.manifest.model.max_positions, limit = o.max_seq_len > 0 ? o.max_seq_len : 4096;
  s->max_seq_len = positions > 0 ? std::min(limit, positions) : limit;
  s->max_batch_size = o.max_batch_size;
  if (const auto now = hw::process_memory(); now.ok()) s->runtime_bytes = now->resident;

  FitQuestion q{&a.manifest, *l, threads, o.max_batch_size, s->max_seq_len, o.kv_fraction, hw::available_memory("/")};
  const int64_t wanted = o.kv_tokens > 0 ? (o.kv_tokens + artifact::kKvPageTokens - 1) / artifact::kKvPageTokens : pages_wanted(q);
  l->kv_pages = wanted;
  s->kv = o.kv_tokens > 0 ? "--kv-tokens" : fmt::format("{} of {} tokens", counted(o.max_batch_size, "sequence"), s->max_seq_len);
  s->memory = exec::plan_memory(a.manifest, *l, threads);
  if (q.room == INT64_MAX) return {};
  if (o.kv_tokens > 0) {
    const bool held = o.weights == "read" || o.expert_cache_bytes > 0;  // else they may be mapped, and need not all be there
    const int64_t needed = s->memory.total() - (held ? 0 : s->memory.weights);
    if (needed <= q.room) {
      if (s->memory.total() > q.room) l->weights = "map";
      return {};
    }
    const std::string ways = what_would_fit(q);
    return fail(ErrorCode::kEnvironment, "{}: does not fit: {} are needed, {} of them for keys and values, and {} of memory are available; {}{}",
                o.engine.string(), human_bytes(double(needed)), human_bytes(double(s->memory.kv)), human_bytes(double(q.room)),
                o.kv_measured ? "measure fewer streams or shorter prompts" : "fewer --kv-tokens", ways.empty() ? "" : ", or " + ways);
  }
  // A mapped file gives its memory back when others need it.
  if (o.weights == "map") q.room += std::min(s->memory.weights, q.room);
  l->kv_pages = pages_that_fit(q);
  s->memory = exec::plan_memory(a.manifest, *l, threads);
  if (l->kv_pages == wanted) return {};
  const std::string ways = what_would_fit(q);
  const int64_t rest = s->memory.total() - s->memory.kv;
  if (l->kv_pages < 1)
    return fail(ErrorCode::kEnvironment,
                "{}: does not fit: {} of memory are available, weights take {} and activations {}: nothing is left for keys and values; {}",
                o.engine.string(), human_bytes(double(q.room)), human_bytes(double(s->memory.weights + s->memory.expert_cache)),
                human_bytes(double(s->memory.activations)), ways.empty() ? "make room" : "use " + ways);
  s->kv = fmt::format("{:.0f} % of the {} that weights and activations leave, instead of {} for {}; all would fit with {}", o.kv_fraction * 100,
                      human_bytes(double(std::max<int64_t>(0, q.room - rest))),
                      human_bytes(double(wanted) * double(exec::kv_page_bytes(a.manifest, l->kv_type))), s->kv,
                      ways.empty() ? "more memory" : ways);
  return {};
}

}  // namespace

Result<Session> open_session(const SessionOptions& o) {
  Session s;
  s.dir = o.engine;
  const int threads = o.threads > 0 ? o.threads : hw::advise_threads().threads;
  std::error_code ec;
  const auto weight_bytes = int64_t(std::filesystem::file_size(o.engine / "weights.bin", ec));
  hw::NumaPlan numa;
  if (o.numa && !ec) numa = hw::plan_numa(hw::memory_nodes("/", hw::allowed_cpus()), threads, weight_bytes);
  s.numa = numa.reason;
  if (!o.expert_profile.empty() && o.expert_cache_bytes == 0 && numa.weight_nodes.size() < 2)
    s.numa += fmt::format("{}nothing for --expert-profile to decide", s.numa.empty() ? "" : ": ");
  s.pool = std::make_unique<hw::ThreadPool>(threads, std::move(numa.worker_cpus));
  MI_TRY(s.text, text::load_model_text(o.engine / "tokenizer"));
  if (o.check) MI_TRY_VOID(o.check(s.text));

  exec::LoadOptions l;
  l.max_tokens_per_step = o.max_tokens_per_step;
  l.kv_type = o.kv_type;
  l.attention_order = o.attention_order;
  l.verify_checksums = o.verify_checksums;
  l.weights = o.weights;
  l.expert_cache_bytes = o.expert_cache_bytes;
  l.memory_pool = o.memory_pool;
  l.weight_nodes = std::move(numa.weight_nodes);
  std::unique_ptr<Progress> progress;
  int64_t shown = 0;
  if (!o.quiet)
    l.progress = [&](int64_t done, int64_t total) {
      if (!progress) progress = std::make_unique<Progress>("load", uint64_t(total), true);
      progress->advance(uint64_t(done - shown));
      shown = done;
    };
  MI_TRY_VOID(plan(o, threads, &l, &s));
  if (!o.expert_profile.empty()) {
    MI_TRY(const artifact::LoadedArtifact a, artifact::open_artifact(o.engine));
    MI_TRY(const ExpertProfile p, artifact::read_expert_profile(o.expert_profile, a.manifest));
    l.expert_chances = expert_chances(p);
  }
  MI_TRY(s.engine, exec::Engine::load(o.engine, l, *s.pool));
  if (progress) progress->done();
  return s;
}

std::unique_ptr<runtime::EngineLoop> Session::make_loop(runtime::LoopOptions l,
                                                        std::shared_ptr<runtime::ExpertLoad> load) const {
  l.max_batch_size = max_batch_size;
  l.max_seq_len = max_seq_len;
  l.prefill_tokens = engine->options().max_tokens_per_step;
  l.reuse_prefixes = l.reuse_prefixes && engine->options().memory_pool;  // what is given back cannot be found again
  l.eos_ids = engine->manifest().model.eos_ids;
  return std::make_unique<runtime::EngineLoop>(runtime::make_engine_stepper(*engine, *pool, std::move(load)),
                                               text.tokenizer, std::move(l));
}

Result<std::shared_ptr<runtime::kv::Store>> Session::open_kv_store(const Path& folder, int64_t bytes,
                                                                   std::function<void(const std::string&)> say) const {
  // Keys and values are what the weights (engine.json has their checksums), the program and its libm make of the
  // tokens. The program is told by its bytes: a version number would have to be thought of at every change.
  MI_TRY(const MappedFile manifest, MappedFile::open(dir / "engine.json"));
  MI_TRY(const MappedFile program, MappedFile::open("/proc/self/exe"));
  const std::string told = fmt::format("{} {} {} {} {} {}", xxh3_hex(manifest.bytes()), xxh3_hex(program.bytes()),
                                       gnu_get_libc_version(), engine->options().kv_type, engine->options().attention_order,
                                       engine->kv_page_bytes());
  runtime::kv::StoreOptions o;
  o.file = {folder, bytes, engine->kv_page_bytes(), xxh3_hex(std::as_bytes(std::span(told))), {}};
  o.say = std::move(say);
  MI_TRY(std::unique_ptr<runtime::kv::Store> store, runtime::kv::Store::open(o));
  return std::shared_ptr<runtime::kv::Store>(std::move(store));
}

std::string stream_text(const exec::StreamStats& s) {
  return fmt::format("experts from disk: {:.1f} % of {} wanted were in memory (room for {} of {}), {} read, {} read ahead of which {} were wanted, {} waited",
                     100 * s.hit_rate(), s.hits + s.misses, s.held, s.experts, human_bytes(double(s.bytes_read)), s.prefetched, s.prefetch_used,
                     human_seconds(double(s.waited_ns) / 1e9));
}

}  // namespace mi::tools
