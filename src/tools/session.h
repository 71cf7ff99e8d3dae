#pragma once
// What a tool needs to run an engine: threads, the loaded engine, its text side.

#include <functional>
#include <memory>
#include <string>

#include "base/file.h"
#include "base/result.h"
#include "exec/engine.h"
#include "exec/memory_plan.h"
#include "hw/thread_pool.h"
#include "runtime/loop.h"
#include "text/model_text.h"

namespace mi::tools {

struct SessionOptions {
  Path engine;
  int threads = 0;  // 0: hw::advise_threads()
  int64_t max_tokens_per_step = 0;  // 0: exec::LoadOptions decides
  int64_t max_batch_size = 32;
  int64_t max_seq_len = 0;  // at most the model's max_positions; 0: those, at most 4096
  int64_t kv_tokens = 0;    // the KV pool has room for so many; 0: for max_batch_size sequences of max_seq_len, ...
  bool kv_measured = false; // kv_tokens come from what is measured, not from a flag: what does not fit is said so
  double kv_fraction = 0.6; // ... but no more than this share of the memory that the weights and activations leave
  std::string kv_type;      // "": the engine's default
  std::string attention_order = "auto";  // exec::LoadOptions::attention_order
  bool verify_checksums = true;
  std::string weights = "auto";  // exec::LoadOptions::weights
  int64_t expert_cache_bytes = 0;  // exec::LoadOptions::expert_cache_bytes
  Path expert_profile;           // what the cache, or several memory nodes, may know beforehand (artifact/expert_profile.h)
  bool memory_pool = true;       // exec::LoadOptions::memory_pool
  bool numa = true;              // plan threads and weights over memory nodes, where there are several
  bool quiet = false;            // no loading progress
  // What else has to be right before the engine is loaded, which may take minutes; it may need the tokenizer. Empty: nothing.
  std::function<Status(const text::ModelText&)> check;
};

struct Session {
  Path dir;  // the engine's
  std::unique_ptr<hw::ThreadPool> pool;
  std::unique_ptr<exec::Engine> engine;
  std::string numa;  // what was planned and why
  std::string kv;    // how large the KV pool is and why
  exec::MemoryPlan memory;    // of the engine
  int64_t runtime_bytes = 0;  // what the process took before it: program, libraries, tokenizer, stacks
  int64_t total_bytes() const { return memory.total() + runtime_bytes; }
  text::ModelText text;
  int64_t max_seq_len = 0;
  int64_t max_batch_size = 0;

  // A loop over the engine; the session must outlive it. Greedy results do not depend on the batch, so one loop serves
  // all. The session says how large batches, sequences and steps are and which tokens end; the rest is taken from o.
  // load: where the choices of experts are counted; null: nowhere.
  std::unique_ptr<runtime::EngineLoop> make_loop(runtime::LoopOptions o = {},
                                                 std::shared_ptr<runtime::ExpertLoad> load = nullptr) const;

  // For LoopOptions::kv_store: pages on disk, at most so many bytes. Those of any other engine, KV type, attention order or build of
  // this program are given up: they need not be what this one computes. say: kv::StoreOptions::say.
  Result<std::shared_ptr<runtime::kv::Store>> open_kv_store(const Path& folder, int64_t bytes,
                                                            std::function<void(const std::string&)> say) const;
};

Result<Session> open_session(const SessionOptions& o);

// "experts from disk: 83.1 % of 1234 were in memory (room for 512 of 1280), ...": for whoever measured.
std::string stream_text(const exec::StreamStats& s);

}  // namespace mi::tools
