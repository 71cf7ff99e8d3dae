#pragma once
// The model as the runtime sees it: rows in, logits out. Tests drive the runtime with a fake.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "exec/batch.h"
#include "exec/engine.h"
#include "hw/thread_pool.h"

namespace mi::runtime {

class ExpertLoad;

class Stepper {
 public:
  virtual ~Stepper() = default;
  virtual int64_t vocab() const = 0;
  virtual int64_t kv_pages() const = 0;  // pages of kv::kPageTokens tokens; their ids are 0 .. kv_pages() - 1
  virtual int64_t max_tokens_per_step() const = 0;
  // exec::Engine::run: one step; logits [rows asked for, vocab] in batch order, valid until the next run().
  virtual std::span<const float> run(const exec::Batch& b) = 0;
  // Values of a hidden state; 0: run_hidden() must not be called.
  virtual int64_t hidden() const { return 0; }
  // run(), and the hidden states that the logits were made of: [rows asked for, hidden()], valid until the next run.
  virtual std::span<const float> run_hidden(const exec::Batch& b, std::span<const float>* states) {
    *states = {};
    return run(b);
  }
  // What a page holds, for who keeps it elsewhere; 0: it can't be had, and the other two must not be called.
  virtual int64_t kv_page_bytes() const { return 0; }
  virtual void save_page(int32_t page, std::span<std::byte> to) const { (void)page, (void)to; }
  virtual void restore_page(int32_t page, std::span<const std::byte> from) { (void)page, (void)from; }
  // Where experts are streamed from disk.
  virtual std::optional<exec::StreamStats> stream_stats() const { return {}; }
  // These pages belong to no sequence any more; they may be used again.
  virtual void freed(std::span<const int32_t> pages) { (void)pages; }
  // fn(i) for i in [0, n), in any order and possibly at once; returns when all are done. For sampling between steps.
  virtual void for_each(int64_t n, const std::function<void(int64_t i)>& fn) {
    for (int64_t i = 0; i < n; ++i) fn(i);
  }
};

// Borrows both. load: where the choices of experts are counted; null: nowhere.
std::unique_ptr<Stepper> make_engine_stepper(exec::Engine& engine, hw::ThreadPool& pool,
                                             std::shared_ptr<ExpertLoad> load = nullptr);

}  // namespace mi::runtime
