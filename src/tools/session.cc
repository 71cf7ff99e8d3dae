#include "tools/session.h"

#include <algorithm>

#include "artifact/reader.h"
#include "base/util.h"
#include "hw/numa.h"
#include "runtime/stepper.h"

namespace mi::tools {

Result<Session> open_session(const SessionOptions& o) {
  Session s;
  const int threads = o.threads > 0 ? o.threads : hw::advise_threads().threads;
  std::error_code ec;
  const auto weight_bytes = std::filesystem::file_size(o.engine / "weights.bin", ec);
  hw::NumaPlan numa;
  if (o.numa && !ec) numa = hw::plan_numa(hw::memory_nodes("/", hw::allowed_cpus()), threads, int64_t(weight_bytes));
  s.numa = numa.reason;
  s.pool = std::make_unique<hw::ThreadPool>(threads, std::move(numa.worker_cpus));
  MI_TRY(s.text, text::load_model_text(o.engine / "tokenizer"));

  exec::LoadOptions l;
  l.max_tokens_per_step = o.max_tokens_per_step;
  l.kv_type = o.kv_type;
  l.verify_checksums = o.verify_checksums;
  l.weights = o.weights;
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
  int64_t positions = 0;  // known before loading, as the pool is made then
  {
    MI_TRY(const artifact::LoadedArtifact a, artifact::open_artifact(o.engine));
    positions = a.manifest.model.max_positions;
  }
  const int64_t limit = o.max_seq_len > 0 ? o.max_seq_len : 4096;
  s.max_seq_len = positions > 0 ? std::min(limit, positions) : limit;
  const auto pages = [](int64_t tokens) { return (tokens + artifact::kKvPageTokens - 1) / artifact::kKvPageTokens; };
  l.kv_pages = o.kv_tokens > 0 ? pages(o.kv_tokens) : pages(s.max_seq_len) * o.max_batch_size;
  MI_TRY(s.engine, exec::Engine::load(o.engine, l, *s.pool));
  if (progress) progress->done();
  s.max_batch_size = o.max_batch_size;
  return s;
}

std::unique_ptr<runtime::EngineLoop> Session::make_loop(runtime::LoopOptions l) const {
  l.max_batch_size = max_batch_size;
  l.max_seq_len = max_seq_len;
  l.prefill_tokens = engine->options().max_tokens_per_step;
  l.reuse_prefixes = l.reuse_prefixes && engine->options().memory_pool;  // what is given back cannot be found again
  l.eos_ids = engine->manifest().model.eos_ids;
  return std::make_unique<runtime::EngineLoop>(runtime::make_engine_stepper(*engine, *pool), text.tokenizer,
                                               std::move(l));
}

}  // namespace mi::tools
