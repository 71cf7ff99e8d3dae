#include "runtime/scheduler.h"

#include <algorithm>
#include <set>

#include "base/check.h"

namespace mi::runtime {

namespace {
bool before(const Sequence* a, const Sequence* b) {
  return a->priority != b->priority ? a->priority < b->priority : a->arrival < b->arrival;
}
}  // namespace

Scheduler::Scheduler(const SchedulerOptions& options, int64_t kv_pages,
                     std::function<void(std::span<const int32_t>)> freed, kv::Below below)
    : options_(options), cache_(kv_pages, options.reuse_prefixes, std::move(freed), std::move(below)) {
  MI_CHECK(options.max_batch_size >= 1);
  MI_CHECK_LE(options.max_batch_size, options.max_tokens_per_step);
  MI_CHECK(options.prefill_tokens >= 1 && options.prefill_tokens_beside_decodes >= 1);
}

void Scheduler::add(Sequence* seq) {
  MI_CHECK(!seq->tokens.empty());
  seq->arrival = next_arrival_++;
  waiting_.insert(std::upper_bound(waiting_.begin(), waiting_.end(), seq, before), seq);
}

void Scheduler::preempt_last() {
  Sequence* victim = running_.back();
  running_.pop_back();
  stop_loading(victim);
  cache_.release(&victim->pages);
  victim->computed = 0;
  victim->running = false;
  waiting_.insert(std::upper_bound(waiting_.begin(), waiting_.end(), victim, before), victim);
}

bool Scheduler::cover(Sequence* seq, int64_t tokens) {
  if (options_.refuse_pages && kv::pages_for(tokens) > seq->pages.size() && options_.refuse_pages()) {
    refused_ = true;
    return false;
  }
  return cache_.cover(&seq->pages, tokens);
}

int64_t Scheduler::load() {
  kv::Store* store = cache_.store();
  if (!store) return 0;
  int64_t came = 0;
  store->collect([&](uint64_t ticket, std::span<const std::byte> data) {
    ++came;
    const auto it = tickets_.find(ticket);
    if (it == tickets_.end()) return;  // its sequence has ended or gave up its pages
    Sequence* seq = it->second;
    tickets_.erase(it);
    if (data.empty()) return stop_loading(seq);
    cache_.restore(&seq->pages, seq->computed / kv::kPageTokens, data);
    seq->computed += kv::kPageTokens;
    if (seq->first_time) seq->reused += kv::kPageTokens;
    ++seq->below_got;
    cache_.publish(&seq->pages, seq->salt, seq->tokens, seq->computed);
  });
  if (came > 0) store_hangs_ = false;
  for (Sequence* seq : running_) {
    while (seq->below_asked < seq->below.size() && store->can_read()) {
      const uint64_t ticket = store->read(seq->below[seq->below_asked]);
      if (ticket == 0) {  // it made room for another meanwhile
        seq->below.resize(seq->below_asked);
        break;
      }
      tickets_.emplace(ticket, seq);
      ++seq->below_asked;
    }
  }
  return came;
}

bool Scheduler::loading() const {
  return std::any_of(running_.begin(), running_.end(), [](const Sequence* s) { return s->loading(); });
}

void Scheduler::stop_loading(Sequence* seq) {
  if (seq->below_got < seq->below_asked) std::erase_if(tickets_, [seq](const auto& t) { return t.second == seq; });
  seq->below.clear();
  seq->below_asked = seq->below_got = 0;
}

void Scheduler::stop_loading() {
  store_hangs_ = true;
  for (Sequence* seq : running_) stop_loading(seq);
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

int64_t Scheduler::pages_to_grow(const Sequence& s) const {
  return kv::pages_for(std::min(options_.growth_tokens, s.most_tokens - int64_t(s.tokens.size())));
}

int64_t Scheduler::room_for(const Sequence& s) const {
  return std::max(int64_t(s.tokens.size()), std::min(options_.floor_tokens, s.most_tokens));
}

bool Scheduler::admit_next() {
  if (waiting_.empty() || running() >= options_.max_batch_size) return false;
  Sequence* seq = waiting_.front();
  const int64_t reused = seq->score_prompt ? 0 : cache_.match(&seq->pages, seq->salt, seq->tokens);
  // Alone, a sequence needs no room to spare: nobody else grows, and it fits to its end.
  const int64_t length = int64_t(seq->tokens.size());
  int64_t need = kv::pages_for(running_.empty() ? length : room_for(*seq)) - seq->pages.size();
  for (const Sequence* s : running_) need += pages_to_grow(*s);
  if (cache_.free_pages() < need) {
    cache_.release(&seq->pages);
    MI_CHECK(!running_.empty(), "a sequence of {} tokens can't fit into {} pages", length, cache_.total());
    return false;
  }
  if (!cover(seq, length)) {
    MI_CHECK(refused_, "{} pages are free and {} were not to be had", cache_.free_pages(), need);
    cache_.release(&seq->pages);
    return false;
  }
  seq->computed = reused;
  seq->first_time = seq->reused < 0;
  if (seq->first_time) seq->reused = reused;
  seq->running = true;
  if (!seq->score_prompt && !store_hangs_) seq->below = cache_.below(seq->pages, seq->salt, seq->tokens);
  waiting_.pop_front();
  running_.insert(std::upper_bound(running_.begin(), running_.end(), seq, before), seq);
  return true;
}

// Whether it would find room if all running ones of larger numbers gave up theirs. Pages that these share are counted
// more than once: then one too many is preempted, as rarely as that is.
bool Scheduler::fits_instead(Sequence* seq) {
  int64_t victims = 0, grow = 0;
  bool others = false;
  for (const Sequence* s : running_) {
    if (seq->priority < s->priority) {
      victims += s->pages.size();
      continue;
    }
    others = true;
    grow += pages_to_grow(*s);
  }
  if (!others) return true;
  if (!seq->score_prompt) cache_.match(&seq->pages, seq->salt, seq->tokens);
  const int64_t need = kv::pages_for(room_for(*seq)) - seq->pages.size() + grow;
  const bool fits = cache_.free_pages() + victims >= need;
  cache_.release(&seq->pages);
  return fits;
}

// Waiting sequences of a smaller priority number than the last running one come in, in its place if need be.
void Scheduler::admit_urgent(StepPlan* plan) {
  while (!waiting_.empty() && !running_.empty() && waiting_.front()->priority < running_.back()->priority) {
    if (admit_next()) continue;
    if (!fits_instead(waiting_.front())) return;
    preempt_last();
    ++plan->preempted;
  }
}

StepPlan Scheduler::plan(int64_t beside_decodes, int64_t alone) {
  StepPlan plan;
  refused_ = false;
  admit_urgent(&plan);
  // Victims come off the end, behind the sequence that asks, so work already planned stays valid.
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence* seq = running_[i];
    if (!seq->decoding()) continue;
    while (seq->running && !cover(seq, seq->computed + 1)) {
      preempt_last();
      ++plan.preempted;
    }
    if (seq->running) plan.work.push_back(Work{.seq = seq, .tokens = 1, .samples = true});
  }
  plan.decodes = int64_t(plan.work.size());

  int64_t budget = plan.decodes > 0 ? beside_decodes : alone;
  budget = std::min(budget, options_.max_tokens_per_step - plan.decodes);
  for (Sequence* seq : running_) {
    if (budget > 0 && !seq->decoding() && !seq->loading()) take_prefill(seq, &budget, &plan);
  }
  while (budget > 0) {
    Sequence* next = waiting_.empty() ? nullptr : waiting_.front();
    if (!admit_next()) break;
    if (!next->loading()) take_prefill(next, &budget, &plan);
  }
  // Guesses get what rows and pages nobody needs.
  int64_t rows = options_.max_tokens_per_step;
  for (const Work& w : plan.work) rows -= w.tokens;
  for (Work& w : plan.work) {
    const int64_t drafts = w.seq->decoding() ? std::min(rows, int64_t(w.seq->draft.size())) : 0;
    if (drafts <= 0 || !cover(w.seq, w.seq->computed + 1 + drafts)) continue;
    w.drafts = drafts;
    rows -= drafts;
  }
  plan.refused = refused_;
  return plan;
}

void Scheduler::advance(const StepPlan& plan) {
  for (const Work& w : plan.work) {
    MI_CHECK(w.seq->running && w.tokens <= w.seq->pending());
    w.seq->computed += w.tokens;
    cache_.publish(&w.seq->pages, w.seq->salt, w.seq->tokens, w.seq->computed);
  }
}

void Scheduler::accept_draft(Sequence* seq) {
  MI_CHECK(seq->running && seq->pending() == 1 && seq->pages.size() * kv::kPageTokens > seq->computed);
  ++seq->computed;
  cache_.publish(&seq->pages, seq->salt, seq->tokens, seq->computed);
}

void Scheduler::remove(Sequence* seq) {
  auto drop = [seq](auto& list) {
    auto it = std::find(list.begin(), list.end(), seq);
    MI_CHECK(it != list.end(), "the sequence is not known to the scheduler");
    list.erase(it);
  };
  seq->running ? drop(running_) : drop(waiting_);
  seq->running = false;
  stop_loading(seq);
  cache_.release(&seq->pages);
}

std::map<int64_t, int64_t> Scheduler::waiting_by_priority() const {
  std::map<int64_t, int64_t> counts;
  for (const Sequence* s : waiting_) ++counts[s->priority];
  return counts;
}

void Scheduler::check_invariants() const {
  cache_.check_invariants();
  std::set<int32_t> held;
  for (const Sequence* s : running_) {
    held.insert(s->pages.pages().begin(), s->pages.pages().end());
    MI_CHECK(s->running && s->pending() >= 0 && s->pages.size() >= kv::pages_for(s->computed));
  }
  for (const Sequence* s : waiting_)
    MI_CHECK(!s->running && s->pages.size() == 0 && s->computed == 0 && s->below.empty());
  for (const auto& [ticket, s] : tickets_) MI_CHECK(s->running && s->loading() && s->below_got < s->below_asked);
  MI_CHECK_EQ(int64_t(held.size()), cache_.used_pages());
  MI_CHECK_LE(running(), options_.max_batch_size);
  MI_CHECK(std::is_sorted(running_.begin(), running_.end(), before));
  MI_CHECK(std::is_sorted(waiting_.begin(), waiting_.end(), before));
}

}  // namespace mi::runtime
