#include "runtime/expert_load.h"
#include "runtime/kv/page_pool.h"
#include "runtime/stepper.h"

namespace mi::runtime {

static_assert(kv::kPageTokens == artifact::kKvPageTokens, "runtime and exec disagree about the size of a KV page");

namespace {

class EngineStepper : public Stepper {
 public:
  EngineStepper(exec::Engine& engine, hw::ThreadPool& pool, std::shared_ptr<ExpertLoad> load)
      : engine_(engine), pool_(pool), load_(std::move(load)) {
    for (const artifact::Instr& i : engine.manifest().program)
      if (i.op == Op::kLinear && i.out[0].type.rows == Rows::kLogit) head_ = &i;
    const auto count = [this](const exec::TapEvent& e) { load_->add(e); };
    tap_.want = [this](const artifact::Instr& i, bool input) {
      return (input && &i == head_) || (load_ && ExpertLoad::wants(i, input));
    };
    tap_.see = [this, count](const exec::TapEvent& e) {
      if (!e.is_input) return count(e);
      if (e.operand == &e.instr->in[0]) states_.assign(e.values, e.values + e.rows * e.cols);
    };
    if (!load_) return;
    load_tap_.want = ExpertLoad::wants;
    load_tap_.see = count;
    engine_.set_tap(&load_tap_);
  }
  ~EngineStepper() override {
    if (load_) engine_.set_tap(nullptr);
  }
  int64_t vocab() const override { return engine_.manifest().model.vocab; }
  int64_t kv_pages() const override { return engine_.kv_pages(); }
  int64_t max_tokens_per_step() const override { return engine_.options().max_tokens_per_step; }
  std::span<const float> run(const exec::Batch& b) override { return engine_.run(b); }
  int64_t hidden() const override { return head_ ? head_->in[0].type.cols : 0; }
  // The tap of the hidden states is there for this step only: others pay nothing for it.
  std::span<const float> run_hidden(const exec::Batch& b, std::span<const float>* states) override {
    states_.clear();
    engine_.set_tap(&tap_);
    const std::span<const float> logits = engine_.run(b);
    engine_.set_tap(load_ ? &load_tap_ : nullptr);
    *states = states_;
    return logits;
  }
  int64_t kv_page_bytes() const override { return engine_.kv_page_bytes(); }
  void save_page(int32_t page, std::span<std::byte> to) const override { engine_.save_page(page, to); }
  void restore_page(int32_t page, std::span<const std::byte> from) override { engine_.restore_page(page, from); }
  std::optional<exec::StreamStats> stream_stats() const override { return engine_.stream_stats(); }
  void freed(std::span<const int32_t> pages) override {
    if (!engine_.options().memory_pool) engine_.forget_pages(pages);
  }
  void for_each(int64_t n, const std::function<void(int64_t)>& fn) override {
    // Waking the pool costs more than a few short rows.
    if (n == 1 || n * vocab() < kWorthThreads) return Stepper::for_each(n, fn);
    pool_.run(n, [&fn](int64_t i, int) { fn(i); });
  }

 private:
  static constexpr int64_t kWorthThreads = 32768;  // logits
  exec::Engine& engine_;
  hw::ThreadPool& pool_;
  const artifact::Instr* head_ = nullptr;  // what turns hidden states into logits
  std::shared_ptr<ExpertLoad> load_;
  exec::Tap tap_, load_tap_;
  std::vector<float> states_;
};

}  // namespace

std::unique_ptr<Stepper> make_engine_stepper(exec::Engine& engine, hw::ThreadPool& pool,
                                             std::shared_ptr<ExpertLoad> load) {
  return std::make_unique<EngineStepper>(engine, pool, std::move(load));
}

}  // namespace mi::runtime
