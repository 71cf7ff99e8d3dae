#include "runtime/batcher.h"

#include <algorithm>
#include <chrono>

#include "base/check.h"
#include "base/util.h"

namespace mi::runtime {

struct Batcher::Live : Sequence {
  Live(Sampler s, OutputText t) : sampler(std::move(s)), text(std::move(t)) {}

  uint64_t id = 0;
  Request request;  // its prompt has moved to Sequence::tokens
  Sink sink;
  Sampler sampler;
  OutputText text;
  std::vector<int32_t> end_ids;            // sorted
  int64_t max_tokens = 0;                  // resolved
  std::vector<uint32_t> mask;              // scratch of the constraint
  std::vector<ScoredToken> prompt_scores;  // by position, until sent
  std::vector<double> pooled;              // sum of the hidden states so far
  double arrival = 0, started = -1, first_token = -1, last_token = -1;

  // Of the current step, written by its row job.
  Sampler::Choice choice;
  bool constraint_ended = false;
  std::vector<int32_t> guessed;                    // its last token and the drafts behind it
  std::vector<std::span<const float>> draft_rows;  // the logits behind each draft

  int64_t generated() const { return int64_t(tokens.size()) - prompt_len; }
};

// One row of logits and what it is for.
struct Batcher::RowJob {
  Live* live = nullptr;
  std::span<const float> logits;
  int64_t scores = -1;  // position of the prompt token that the row scores, -1: none
  bool samples = false;
};

namespace {
// A disk that gives nothing for so long is not waited for; what a page takes to be computed is far less.
constexpr double kDiskSeconds = 10;
constexpr std::chrono::milliseconds kDiskWait{10};  // at a time: who arrives or leaves meanwhile waits as well

int64_t prompt_rows(const StepPlan& plan) {
  int64_t rows = 0;
  for (size_t i = size_t(plan.decodes); i < plan.work.size(); ++i) rows += plan.work[i].tokens;
  return rows;
}
}  // namespace

LoopOptions fit_options(LoopOptions o, const Stepper& stepper) {
  const int64_t rows = stepper.max_tokens_per_step();
  o.max_batch_size = std::clamp<int64_t>(o.max_batch_size, 1, rows);
  o.prefill_tokens = std::clamp<int64_t>(o.prefill_tokens, 1, rows);
  o.prefill_tokens_beside_decodes = std::clamp<int64_t>(o.prefill_tokens_beside_decodes, 1, o.prefill_tokens);
  o.max_seq_len = std::max<int64_t>(o.max_seq_len, 1);
  return o;
}

Batcher::Batcher(Stepper& stepper, std::shared_ptr<const text::Tokenizer> tokenizer, LoopOptions options, uint64_t seed,
                 Clock clock)
    : stepper_(stepper),
      tokenizer_(std::move(tokenizer)),
      options_(fit_options(std::move(options), stepper)),
      seed_(seed),
      clock_(std::move(clock)),
      limits_{stepper.vocab(), options_.max_seq_len, stepper.kv_pages() * kv::kPageTokens, stepper.hidden()},
      scheduler_({options_.max_batch_size, stepper.max_tokens_per_step(), options_.prefill_tokens,
                  options_.prefill_tokens_beside_decodes, options_.reuse_prefixes, options_.kv_floor_tokens,
                  options_.kv_growth_tokens, options_.refuse_pages},
                 stepper.kv_pages(), [&stepper](std::span<const int32_t> pages) { stepper.freed(pages); },
                 {options_.kv_store, [&stepper](int32_t page, std::span<std::byte> to) { stepper.save_page(page, to); },
                  [&stepper](int32_t page, std::span<const std::byte> from) { stepper.restore_page(page, from); }}) {
  if (options_.kv_store) MI_CHECK_EQ(options_.kv_store->page_bytes(), stepper.kv_page_bytes());
  pace_ = Pace(options_.step_seconds, options_.alone_seconds, options_.step_grows);
  queue_rate_ = QueueRate(options_.max_batch_size);
  refresh_gauges();
}

Batcher::~Batcher() {
  cancel_all();
  deliver_ended();
}

void Batcher::add(uint64_t id, Request r, Sink sink, double arrival) {
  std::vector<int32_t> ends = r.stop_token_ids;
  if (!r.sampling.ignore_eos) ends.insert(ends.end(), options_.eos_ids.begin(), options_.eos_ids.end());
  std::erase_if(ends, [this](int32_t t) { return t < 0 || t >= limits_.vocab; });
  std::sort(ends.begin(), ends.end());
  ends.erase(std::unique(ends.begin(), ends.end()), ends.end());

  auto live = std::make_unique<Live>(
      Sampler(r.sampling, random_u64(seed_, id), r.prompt, ends),
      OutputText(tokenizer_, r.skip_special_tokens, r.stop, r.sampling.min_tokens, r.shown_special));
  Live& l = *live;
  l.id = id;
  l.request = std::move(r);
  l.sink = std::move(sink);
  l.end_ids = std::move(ends);
  l.arrival = arrival;
  const int64_t prompt = int64_t(l.request.prompt.size());
  l.max_tokens = l.request.max_tokens >= 0 ? l.request.max_tokens : limits_.longest() - prompt;
  l.prompt_len = prompt;
  l.tokens = std::move(l.request.prompt);
  l.priority = l.request.priority;
  l.most_tokens = prompt + l.max_tokens;
  l.salt = l.request.cache_salt;
  l.score_prompt = l.request.prompt_logprobs || l.request.pooling == Pooling::kMean;
  if (l.request.prompt_logprobs) {
    l.prompt_scores.resize(size_t(prompt));
    l.prompt_scores[0].token = l.tokens[0];
  }
  if (l.request.constraint) l.mask.resize(size_t((limits_.vocab + 31) / 32));
  MI_CHECK(live_.emplace(id, std::move(live)).second, "request id {} twice", id);
  scheduler_.add(&l);
  refresh_gauges();
}

void Batcher::cancel(uint64_t id) { end_early(id, FinishReason::kCancelled); }

void Batcher::end_early(uint64_t id, FinishReason reason) {
  auto it = live_.find(id);
  if (it == live_.end()) return;
  FinishEvent e;
  e.reason = reason;
  e.text = it->second->text.finish();
  finish(*it->second, std::move(e));
}

void Batcher::cancel_all() {
  std::vector<uint64_t> ids;
  for (const auto& [id, live] : live_) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  for (uint64_t id : ids) cancel(id);
}

void Batcher::end_overdue(double now) {
  std::vector<uint64_t> overdue;
  for (const auto& [id, live] : live_)
    if (live->request.timeout_seconds > 0 && now - live->arrival >= live->request.timeout_seconds)
      overdue.push_back(id);
  std::sort(overdue.begin(), overdue.end());
  for (uint64_t id : overdue) end_early(id, FinishReason::kTimeout);
}

void Batcher::load(double now) {
  if (scheduler_.load() > 0 || !scheduler_.loading()) {
    loaded_at_ = now;
  } else if (now - loaded_at_ > kDiskSeconds) {
    scheduler_.stop_loading();
  }
}

bool Batcher::step() {
  const double begin = clock_();
  end_overdue(begin);
  load(begin);
  StepPlan plan = scheduler_.plan(pace_.prompt_tokens(options_.prefill_tokens_beside_decodes),
                                  pace_.prompt_tokens_alone(options_.prefill_tokens));
  if (plan.work.empty()) {
    const bool loading = scheduler_.loading();
    MI_CHECK(idle() || loading || plan.refused, "{} requests wait and nothing can run", live_.size());
    load(begin);
    scheduler_.write_behind(INT64_MAX);
    const bool waits = loading || unsaved();
    if (waits && options_.kv_store->reading() + options_.kv_store->writing() > 0) options_.kv_store->wait(kDiskWait);
    refresh_gauges();
    return waits || plan.refused;
  }
  load(begin);  // who was admitted just now waits for the disk during this step already
  exec::Batch batch;
  int64_t started = 0;
  for (const Work& w : plan.work) {
    Live& live = static_cast<Live&>(*w.seq);
    if (live.started < 0) {
      ++started;
      live.started = begin;
      stats_.queue.add(begin - live.arrival);
      stats_.prompt_tokens += uint64_t(w.seq->prompt_len);
      stats_.reused_tokens += uint64_t(w.seq->reused);
    }
    std::span<const int32_t> tokens = std::span(w.seq->tokens).subspan(size_t(w.seq->computed), size_t(w.tokens));
    if (w.drafts > 0) {
      live.guessed.assign(tokens.begin(), tokens.end());
      live.guessed.insert(live.guessed.end(), live.draft.begin(), live.draft.begin() + w.drafts);
      tokens = live.guessed;
    }
    batch.chunks.push_back({tokens, w.seq->computed, w.seq->pages.pages(), w.logits_from});
    stats_.computed_tokens += tokens.size();
    stats_.draft_tokens += uint64_t(w.drafts);
  }
  stats_.preemptions += uint64_t(plan.preempted);
  queue_rate_.step(started, scheduler_.waiting(), begin);
  stats_.seconds_per_start = queue_rate_.seconds_per_start();

  const auto pools = [](const Work& w) { return static_cast<Live&>(*w.seq).request.pooling != Pooling::kNone; };
  const bool any_pools = std::any_of(plan.work.begin(), plan.work.end(), pools);
  std::span<const float> hidden;
  const double model_begin = clock_();
  std::span<const float> logits = any_pools ? stepper_.run_hidden(batch, &hidden) : stepper_.run(batch);
  const double model_end = clock_();
  if (plan.decodes == int64_t(plan.work.size()) && model_ended_ >= 0) {
    stats_.decode_step.add(model_end - model_begin);
    stats_.step_gap.add(model_begin - model_ended_);
  }
  if (any_pools) pool_rows(plan, hidden);

  std::vector<RowJob> jobs;
  collect_rows(plan, logits, &jobs);
  stepper_.for_each(int64_t(jobs.size()), [&](int64_t i) { run_row(jobs[size_t(i)]); });
  scheduler_.advance(plan);
  for (const Work& w : plan.work) {
    if (w.samples) deliver(static_cast<Live&>(*w.seq));
  }
  pace_.ran(plan.decodes, prompt_rows(plan), clock_() - begin);
  // A copy beside what 64 tokens, or a step, take to be computed: hardly anything.
  scheduler_.write_behind(1 + prompt_rows(plan) / kv::kPageTokens);

  ++stats_.steps;
  stats_.step_seconds += model_end - model_begin;
  stats_.host_seconds += (model_begin - begin) + (clock_() - model_end);
  model_ended_ = idle() ? -1 : model_end;
  refresh_gauges();
  return true;
}

void Batcher::collect_rows(const StepPlan& plan, std::span<const float> logits, std::vector<RowJob>* jobs) {
  const size_t vocab = size_t(limits_.vocab);
  size_t row = 0;
  for (const Work& w : plan.work) {
    Live* live = static_cast<Live*>(w.seq);
    live->draft_rows.clear();
    for (int64_t i = w.logits_from; i < w.tokens + w.drafts; ++i, ++row) {
      MI_CHECK((row + 1) * vocab <= logits.size(), "the step returned {} logits, row {} was asked for", logits.size(),
               row);
      RowJob job{live, logits.subspan(row * vocab, vocab)};
      if (i >= w.tokens) {
        live->draft_rows.push_back(job.logits);
        continue;
      }
      const int64_t next = w.seq->computed + i + 1;  // the position that this row speaks about
      if (live->request.prompt_logprobs && w.seq->score_prompt && next < w.seq->prompt_len) job.scores = next;
      job.samples = w.samples && i + 1 == w.tokens && live->max_tokens > 0;
      if (job.scores >= 0 || job.samples) jobs->push_back(job);
    }
  }
}

// Adds up the states of each pooling request's rows, in the order of its tokens whatever the chunks.
void Batcher::pool_rows(const StepPlan& plan, std::span<const float> hidden) {
  const size_t width = size_t(limits_.hidden);
  size_t row = 0;
  for (const Work& w : plan.work) {
    Live& live = static_cast<Live&>(*w.seq);
    const Pooling pooling = live.request.pooling;
    if (w.seq->computed == 0 || live.pooled.empty())  // at 0 again, if preempted
      live.pooled.assign(pooling == Pooling::kNone ? 0 : width, 0.0);
    for (int64_t i = w.logits_from; i < w.tokens + w.drafts; ++i, ++row) {
      MI_CHECK((row + 1) * width <= hidden.size(), "the step returned {} hidden values, row {} was asked for",
               hidden.size(), row);
      const bool last = i < w.tokens && w.seq->computed + i + 1 == w.seq->prompt_len;
      if (pooling == Pooling::kNone || (pooling == Pooling::kLast && !last)) continue;
      for (size_t k = 0; k < width; ++k) live.pooled[k] += double(hidden[row * width + k]);
    }
  }
}

// Touches its own request only, so jobs may run at once; two jobs of one request write different things.
void Batcher::run_row(const RowJob& job) const {
  Live& live = *job.live;
  if (job.scores >= 0) {
    ScoredToken& slot = live.prompt_scores[size_t(job.scores)];
    const int32_t token = live.tokens[size_t(job.scores)];
    // A row that is no distribution gets a finite score here; if it is the last, sampling reports it.
    if (usable_row(job.logits))
      slot = score_token(job.logits, token, std::max(live.request.sampling.logprobs, 0));
    else
      slot = ScoredToken{token, kLowestLogprob, {}};
  }
  if (!job.samples) return;
  live.constraint_ended = live.request.constraint && !live.request.constraint->fill_mask(live.mask);
  if (!live.constraint_ended) live.choice = live.sampler.choose(job.logits, live.mask);
}

void Batcher::deliver(Live& live) {
  if (live.score_prompt) {
    live.score_prompt = false;  // a recomputation after a preemption scores nothing again
    if (live.request.prompt_logprobs) live.sink(PromptEvent{std::move(live.prompt_scores)});
    live.prompt_scores = {};
  }
  if (live.request.pooling != Pooling::kNone) {
    const double rows = live.request.pooling == Pooling::kMean ? double(live.prompt_len) : 1.0;
    EmbeddingEvent e;
    for (double sum : live.pooled) e.values.push_back(float(sum / rows));
    live.sink(std::move(e));
  }
  FinishEvent end;
  if (take_token(live, &end)) return finish(live, std::move(end));
  // A draft that is the token which was chosen has been computed already, and the row behind it chooses the next one.
  for (size_t i = 0; i < live.draft_rows.size() && live.tokens.back() == live.draft[i]; ++i) {
    scheduler_.accept_draft(&live);
    ++stats_.accepted_draft_tokens;
    run_row({&live, live.draft_rows[i], -1, true});
    if (take_token(live, &end)) return finish(live, std::move(end));
  }
  guess(live);
}

// No further than the answer may go: a draft has a place in the cache, and the token behind it is still wanted.
void Batcher::guess(Live& live) const {
  const int64_t left = std::min(live.max_tokens - live.generated(), limits_.longest() - int64_t(live.tokens.size()));
  const int64_t most = std::min(options_.draft_tokens, left - 1);
  live.draft = most > 0 ? repeat_draft(live.tokens, most) : std::vector<int32_t>();
}

// Adds the step's token to the request and reports it; true if the request ends, with the reason and the last text.
bool Batcher::take_token(Live& live, FinishEvent* end) {
  auto ends = [&](FinishReason reason) {
    end->reason = reason;
    end->text += live.text.finish();
    // Held-back text may turn out to hold a stop string when nothing more follows.
    if (live.text.stopped_by() && reason == FinishReason::kLength) end->reason = FinishReason::kStop;
    if (live.text.stopped_by()) end->stop_string = live.text.stopped_by();
    return true;
  };
  auto broken = [&](std::string why) {
    end->message = std::move(why);
    return ends(FinishReason::kError);
  };
  if (live.max_tokens == 0) return ends(FinishReason::kLength);
  auto invalid = [&](std::string why) {
    end->message = std::move(why);
    return ends(FinishReason::kInvalid);
  };
  if (live.constraint_ended) {
    if (Status s = live.request.constraint->failure(); !s.ok()) return invalid(s.error().message());
    return ends(FinishReason::kStop);
  }
  if (live.choice.outcome == Sampler::Outcome::kBadLogits)
    return broken("the model's output holds values that are not numbers");
  if (live.choice.outcome == Sampler::Outcome::kNothingAllowed) {
    std::string why = "no token is allowed by the bans and the grammar of this request";
    return live.request.constraint ? invalid(std::move(why)) : broken(std::move(why));
  }

  const int32_t token = live.choice.scored.token;
  live.sampler.accept(token);
  live.tokens.push_back(token);
  ++stats_.generated_tokens;
  const double now = clock_();
  if (live.first_token < 0) {
    live.first_token = now;
    stats_.ttft.add(now - live.arrival);
  } else {
    stats_.inter_token.add(now - live.last_token);
  }
  live.last_token = now;

  TokenEvent event;
  event.token = token;
  event.end = std::binary_search(live.end_ids.begin(), live.end_ids.end(), token);
  event.logprob = live.choice.scored.logprob;
  event.top = std::move(live.choice.scored.top);
  if (event.end) {
    live.sink(std::move(event));
    end->stop_token = token;
    return ends(FinishReason::kStop);
  }
  if (live.request.constraint) {
    if (Status s = live.request.constraint->accept(token); !s.ok()) return invalid(s.error().message());
  }
  event.text = live.text.push(token);
  live.sink(std::move(event));
  if (live.text.stopped_by()) return ends(FinishReason::kStop);
  if (live.request.constraint && live.request.constraint->finished()) return ends(FinishReason::kStop);
  if (live.generated() >= live.max_tokens) return ends(FinishReason::kLength);
  return false;
}

void Batcher::finish(Live& live, FinishEvent e) {
  const double now = clock_();
  e.prompt_tokens = live.prompt_len;
  e.completion_tokens = live.generated();
  e.reused_tokens = std::max<int64_t>(live.reused, 0);
  e.queue_seconds = (live.started >= 0 ? live.started : now) - live.arrival;
  e.ttft_seconds = live.first_token >= 0 ? live.first_token - live.arrival : 0;
  e.total_seconds = now - live.arrival;
  stats_.e2e.add(e.total_seconds);
  ++stats_.finished[size_t(e.reason)];

  scheduler_.remove(&live);
  auto node = live_.extract(live.id);
  ended_.emplace_back(std::move(node.mapped()), std::move(e));
  refresh_gauges();
}

bool Batcher::deliver_ended() {
  auto ended = std::exchange(ended_, {});
  for (auto& [live, event] : ended) live->sink(std::move(event));
  return !ended.empty();
}

void Batcher::refresh_gauges() {
  stats_.running = scheduler_.running();
  stats_.step_limit = pace_.step_limit();
  stats_.waiting = scheduler_.waiting();
  const kv::Cache& cache = scheduler_.cache();
  stats_.kv_pages_total = cache.total();
  stats_.kv_pages_used = cache.used_pages();
  stats_.kv_pages_reusable = cache.idle_pages();
  stats_.kv_pages_given_up = cache.given_up();
  if (options_.kv_store) stats_.kv_disk = options_.kv_store->stats();
  if (const auto s = stepper_.stream_stats()) stats_.experts = *s;
}

}  // namespace mi::runtime
