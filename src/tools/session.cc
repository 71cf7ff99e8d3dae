#include "tools/session.h"

#include <gnu/libc-version.h>

#include <algorithm>

#include "artifact/reader.h"
#include "base/counted.h"
#include "base/util.h"
#include "hw/memory.h"
#include "hw/numa.h"
#include "runtime/stepper.h"

namespace mi::tools {

Result<Session> open_session(const SessionOptions& o) {
  Session s;
  s.dir = o.engine;
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
  l.attention_order = o.attention_order;
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
  int64_t positions = 0, kv_token_bytes = 0, activations = 0;  // known before loading, as the pool is made then
  {
    MI_TRY(const artifact::LoadedArtifact a, artifact::open_artifact(o.engine));
    positions = a.manifest.model.max_positions;
    const std::string kv = o.kv_type.empty() ? a.manifest.default_kv : o.kv_type;
    // int8 has a scale (float) per token and head beside its bytes: less than half as much again for heads of 8 and more.
    kv_token_bytes = a.manifest.memory.kv_bytes_per_token_bf16 * (kv == "f32" ? 8 : kv == "bf16" ? 4 : 3) / 4;
    const int64_t usual = exec::step_tokens(a.manifest.memory.activation_bytes_per_token);
    const int64_t rows = o.max_tokens_per_step > 0 ? std::min(o.max_tokens_per_step, usual) : usual;  // more are committed as used
    activations = a.manifest.memory.activation_bytes_per_token * rows;
  }
  const int64_t limit = o.max_seq_len > 0 ? o.max_seq_len : 4096;
  s.max_seq_len = positions > 0 ? std::min(limit, positions) : limit;
  const auto pages = [](int64_t tokens) { return (tokens + artifact::kKvPageTokens - 1) / artifact::kKvPageTokens; };
  l.kv_pages = o.kv_tokens > 0 ? pages(o.kv_tokens) : pages(s.max_seq_len) * o.max_batch_size;
  s.kv = o.kv_tokens > 0 ? "--kv-tokens"
                         : fmt::format("{} of {} tokens", counted(o.max_batch_size, "sequence"), s.max_seq_len);
  const int64_t available = hw::available_memory("/");
  if (o.kv_tokens == 0 && kv_token_bytes > 0 && available < INT64_MAX) {
    const double left = std::max(double(available) - double(weight_bytes) - double(activations), 0.0);
    const auto most = int64_t(left * o.kv_fraction / double(kv_token_bytes * artifact::kKvPageTokens));
    if (most < 1)
      return fail(ErrorCode::kEnvironment,
                  "{}: {} of memory are available, the weights take {} and the activations of a step {}: nothing is left "
                  "for keys and values; make room, or quantize the model further",
                  o.engine.string(), human_bytes(double(available)), human_bytes(double(weight_bytes)),
                  human_bytes(double(activations)));
    if (most < l.kv_pages) {
      s.kv = fmt::format("{:.0f} % of the {} that weights and activations leave, instead of {} for {}", o.kv_fraction * 100,
                         human_bytes(left), human_bytes(double(l.kv_pages * kv_token_bytes * artifact::kKvPageTokens)),
                         s.kv);
      l.kv_pages = most;
    }
  }
  if (o.kv_filled) {
    const double kv = double(o.kv_tokens) * double(kv_token_bytes), need = kv + double(activations);
    if (need > double(available))
      return fail(ErrorCode::kEnvironment,
                  "{}: {} of memory are available, keys and values of {} tokens take {} and the activations of a step {}: "
                  "measure fewer streams or shorter prompts",
                  o.engine.string(), human_bytes(double(available)), o.kv_tokens, human_bytes(kv),
                  human_bytes(double(activations)));
    if (l.weights == "auto" && need + double(weight_bytes) > double(available)) l.weights = "map";
  }
  MI_TRY(s.engine, exec::Engine::load(o.engine, l, *s.pool));
  if (progress) progress->done();
  s.max_batch_size = o.max_batch_size;
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

}  // namespace mi::tools
