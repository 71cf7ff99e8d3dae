#include "tools/driver.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/util.h"

namespace mi::tools {

Driver::Driver(exec::Engine& engine) : engine_(engine), vocab_(engine.manifest().model.vocab) {}

int64_t Driver::pages_needed(int64_t streams, int64_t tokens_each) {
  return streams * ((tokens_each + artifact::kKvPageTokens - 1) / artifact::kKvPageTokens);
}

void Driver::start(int64_t streams, int64_t prompt, int64_t generate, uint64_t seed) {
  const int64_t pages_each = pages_needed(1, prompt + generate);
  MI_CHECK_LE(pages_each * streams, engine_.kv_pages());
  sequences_.assign(size_t(streams), {});
  prefilled_ = 0;
  for (int64_t s = 0; s < streams; ++s) {
    Sequence& q = sequences_[size_t(s)];
    for (int64_t i = 0; i < prompt; ++i)
      q.ids.push_back(int32_t(random_u64(seed, uint64_t(s * prompt + i)) % uint64_t(vocab_)));
    q.pages.resize(size_t(pages_each));
    std::iota(q.pages.begin(), q.pages.end(), int32_t(s * pages_each));
  }
}

bool Driver::prefill_step() {
  if (prefilled_ == sequences_.size()) return false;
  exec::Batch b;
  const size_t first = prefilled_;
  for (int64_t room = engine_.options().max_tokens_per_step; room > 0 && prefilled_ < sequences_.size();) {
    Sequence& q = sequences_[prefilled_];
    const int64_t n = std::min(room, int64_t(q.ids.size()) - q.done);
    const bool last = q.done + n == int64_t(q.ids.size());
    b.chunks.push_back(
        {std::span<const int32_t>(q.ids).subspan(size_t(q.done), size_t(n)), q.done, q.pages, last ? n - 1 : n});
    q.done += n;
    room -= n;
    if (last) ++prefilled_;
  }
  const std::span<const float> logits = run(b);
  for (size_t s = first; s < prefilled_; ++s) sequences_[s].next = best(logits, s - first);
  return true;
}

void Driver::decode_step() {
  MI_CHECK_EQ(prefilled_, sequences_.size());
  exec::Batch b;
  for (Sequence& q : sequences_) b.chunks.push_back({std::span<const int32_t>(&q.next, 1), q.done, q.pages, 0});
  const std::span<const float> logits = run(b);
  for (size_t s = 0; s < sequences_.size(); ++s) {
    sequences_[s].next = best(logits, s);
    ++sequences_[s].done;
  }
}

std::span<const float> Driver::run(const exec::Batch& b) {
  if (before_step) before_step(b);
  return engine_.run(b);
}

int32_t Driver::best(std::span<const float> logits, size_t row) const {
  const float* at = logits.data() + row * size_t(vocab_);
  return int32_t(std::max_element(at, at + vocab_) - at);
}

}  // namespace mi::tools
