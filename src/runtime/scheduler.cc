#include "runtime/scheduler.h"

#include <algorithm>

#include "base/check.h"

namespace mi::runtime {

namespace {
bool older(const Sequence* a, const Sequence* b) { return a->arrival < b->arrival; }
}  // namespace

Scheduler::Scheduler(const SchedulerOptions& options, int64_t kv_pages, std::function<void(std::span<const int32_t>)> freed)
    : options_(options), pool_(kv_pages, std::move(freed)) {
  MI_CHECK(options.max_batch_size >= 1);
  MI_CHECK_LE(options.max_batch_size, options.max_tokens_per_step);
  MI_CHECK(options.prefill_tokens >= 1 && options.prefill_tokens_beside_decodes >= 1);
}

void Scheduler::add(Sequence* seq) {
  MI_CHECK(!seq->tokens.empty());
  seq->arrival = next_arrival_++;
  waiting_.push_back(seq);
}

void Scheduler::preempt_youngest() {
  Sequence* victim = running_.back();
  running_.pop_back();
  victim->pages.release(pool_);
  victim->computed = 0;
  victim->running = false;
  waiting_.insert(std::upper_bound(waiting_.begin(), waiting_.end(), victim, older), victim);
}

void Scheduler::take_prefill(Sequence* seq, int64_t* budget, StepPlan* plan) const {
  Work w;
  w.seq = seq;
  w.tokens = std::min(seq->pending(), *budget);
  w.samples = w.tokens == seq->pending();
  w.logits_from = w.samples ? w.tokens - 1 : w.tokens;
  if (seq->score_prompt && seq->computed < seq->prompt_len) w.logits_from = 0;
  *budget -= w.tokens;
  plan->work.push_back(w);
}

bool Scheduler::admit_next() {
  if (waiting_.empty() || running() >= options_.max_batch_size) return false;
  Sequence* seq = waiting_.front();
  int64_t need = kv::pages_for(int64_t(seq->tokens.size()));
  if (pool_.free_pages() < need + running()) {
    MI_CHECK(!running_.empty(), "a sequence of {} tokens can't fit into {} pages", seq->tokens.size(), pool_.total());
    return false;
  }
  bool covered = seq->pages.cover(pool_, int64_t(seq->tokens.size()));
  MI_CHECK(covered);
  seq->running = true;
  waiting_.pop_front();
  running_.insert(std::upper_bound(running_.begin(), running_.end(), seq, older), seq);
  return true;
}

StepPlan Scheduler::plan() {
  StepPlan plan;
  // Victims come off the young end, behind the sequence that asks, so work already planned stays valid.
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence* seq = running_[i];
    if (!seq->decoding()) continue;
    while (seq->running && !seq->pages.cover(pool_, seq->computed + 1)) {
      preempt_youngest();
      ++plan.preempted;
    }
    if (seq->running) plan.work.push_back(Work{seq, 1, 0, true});
  }
  plan.decodes = int64_t(plan.work.size());

  int64_t budget = plan.decodes > 0 ? options_.prefill_tokens_beside_decodes : options_.prefill_tokens;
  budget = std::min(budget, options_.max_tokens_per_step - plan.decodes);
  for (Sequence* seq : running_) {
    if (budget > 0 && !seq->decoding()) take_prefill(seq, &budget, &plan);
  }
  while (budget > 0) {
    Sequence* next = waiting_.empty() ? nullptr : waiting_.front();
    if (!admit_next()) break;
    take_prefill(next, &budget, &plan);
  }
  return plan;
}

void Scheduler::advance(const StepPlan& plan) {
  for (const Work& w : plan.work) {
    MI_CHECK(w.seq->running && w.tokens <= w.seq->pending());
    w.seq->computed += w.tokens;
  }
}

void Scheduler::remove(Sequence* seq) {
  auto drop = [seq](auto& list) {
    auto it = std::find(list.begin(), list.end(), seq);
    MI_CHECK(it != list.end(), "the sequence is not known to the scheduler");
    list.erase(it);
  };
  seq->running ? drop(running_) : drop(waiting_);
  seq->running = false;
  seq->pages.release(pool_);
}

void Scheduler::check_invariants() const {
  int64_t held = 0;
  for (const Sequence* s : running_) {
    held += s->pages.size();
    MI_CHECK(s->running && s->pending() >= 0 && s->pages.size() >= kv::pages_for(s->computed));
  }
  for (const Sequence* s : waiting_) MI_CHECK(!s->running && s->pages.size() == 0 && s->computed == 0);
  MI_CHECK_EQ(held, pool_.used_pages());
  MI_CHECK_EQ(pool_.free_pages() + pool_.used_pages(), pool_.total());
  MI_CHECK_LE(running(), options_.max_batch_size);
  MI_CHECK(std::is_sorted(running_.begin(), running_.end(), older));
  MI_CHECK(std::is_sorted(waiting_.begin(), waiting_.end(), older));
}

}  // namespace mi::runtime
