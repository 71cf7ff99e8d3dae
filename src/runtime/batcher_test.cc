#include "runtime/batcher.h"

#include <gtest/gtest.h>

#include <cmath>

#include "runtime/bench_for_tests.h"

namespace mi::runtime {
namespace {

using testing::FakeStepper;
using testing::Recorder;
using testing::request;

std::shared_ptr<const text::Tokenizer> tokenizer() {
  static auto t = testing::make_tokenizer(testing::letter_pieces(64));
  return t;
}

struct BatcherBench : testing::Bench {
  explicit BatcherBench(const FakeStepper::Config& c = {}, LoopOptions o = {},
                 std::shared_ptr<const text::Tokenizer> t = tokenizer())
      : testing::Bench(c, std::move(o), std::move(t)) {}
};

std::vector<int32_t> alone(Request r) {
  BatcherBench b({.pages = 200});
  Recorder& rec = b.add(std::move(r));
  b.run();
  return rec.tokens();
}

TEST(Batcher, OneRequestToItsLimit) {
  BatcherBench b;
  Recorder& r = b.add(request(1, 10, 7));
  b.run();
  FinishEvent f = r.finish();
  EXPECT_EQ(f.reason, FinishReason::kLength);
  EXPECT_EQ(f.prompt_tokens, 10);
  EXPECT_EQ(f.completion_tokens, 7);
  EXPECT_EQ(r.tokens().size(), 7u);
  EXPECT_EQ(r.text(), tokenizer()->decode(r.tokens(), true).value());
  EXPECT_EQ(b.batcher.stats().kv_pages_used, 0);
  EXPECT_EQ(b.batcher.stats().generated_tokens, 7u);
  EXPECT_EQ(b.batcher.stats().computed_tokens, 10u + 6u);
  EXPECT_GT(f.ttft_seconds, 0);
  EXPECT_GT(f.total_seconds, f.ttft_seconds);
}

TEST(Batcher, StepsThatOnlyContinueAnswersAreTimedWithWhatLiesBeforeThem) {
  BatcherBench b;
  b.add(request(1, 10, 7));
  b.run();
  const auto expect = [&](uint64_t steps) {
    const Stats& s = b.batcher.stats();
    EXPECT_EQ(s.decode_step.count, steps);
    EXPECT_EQ(s.step_gap.count, steps);
    EXPECT_NEAR(s.decode_step.sum, 0.001 * double(steps), 1e-9) << "the clock is read before and behind the model";
    EXPECT_GT(s.step_gap.sum, 0.001 * double(steps));
  };
  expect(6);  // the first token comes with the prompt
  b.now += 1000;
  b.add(request(2, 10, 3));
  b.run();
  expect(8);
  EXPECT_LT(b.batcher.stats().step_gap.sum, 1) << "the time without work is no gap";
  b.add(request(3, 10, 2));
  b.step();
  b.add(request(4, 10, 1));
  b.run();
  expect(8);  // a step with a prompt in it is another thing
}

TEST(Batcher, HowQuicklyTheQueueMoves) {
  BatcherBench b({}, {.max_batch_size = 1});
  for (uint64_t i = 0; i < 4; ++i) b.add(request(i, 10, 5));
  EXPECT_EQ(b.batcher.queue(), (std::map<int64_t, int64_t>{{0, 4}}));
  b.step();
  EXPECT_EQ(b.batcher.stats().seconds_per_start, 0) << "not known yet";
  const double begin = b.now;
  while (b.batcher.queue()[0] > 2) b.step();
  EXPECT_NEAR(b.batcher.stats().seconds_per_start, b.now - begin, 0.02);
  Request urgent = request(9, 10, 5);
  urgent.priority = -3;
  b.add(std::move(urgent));
  EXPECT_EQ(b.batcher.queue(), (std::map<int64_t, int64_t>{{-3, 1}, {0, 2}}));
  b.run();
  EXPECT_TRUE(b.batcher.queue().empty());
}

Request embedding(uint64_t seed, int64_t prompt, Pooling pooling) {
  Request r = request(seed, prompt, 0);
  r.pooling = pooling;
  return r;
}

TEST(Batcher, EmbeddingsArePooledOverTheWholePrompt) {
  // What the fake gives for each prefix of the prompt alone, pooled by hand.
  std::vector<double> mean(5, 0.0);
  std::vector<float> last;
  for (int64_t n = 1; n <= 20; ++n) {
    BatcherBench b({.hidden = 5});
    Request r = embedding(3, 20, Pooling::kLast);
    r.prompt.resize(size_t(n));
    Recorder& rec = b.add(std::move(r));
    b.run();
    last = rec.embedding();
    ASSERT_EQ(last.size(), 5u);
    for (size_t k = 0; k < 5; ++k) mean[k] += double(last[k]) / 20;
  }
  for (int64_t chunk : {1, 7, 64}) {
    BatcherBench b({.hidden = 5}, {.max_batch_size = 4, .prefill_tokens = chunk, .prefill_tokens_beside_decodes = chunk});
    b.add(request(1, 30, 20));
    Recorder& m = b.add(embedding(3, 20, Pooling::kMean));
    Recorder& l = b.add(embedding(3, 20, Pooling::kLast));
    b.run();
    EXPECT_EQ(l.embedding(), last);
    EXPECT_EQ(m.finish().reason, FinishReason::kLength);
    EXPECT_TRUE(m.prompt().empty());
    for (size_t k = 0; k < 5; ++k) EXPECT_NEAR(m.embedding()[k], mean[k], 1e-5);
  }
}

TEST(Batcher, EmbeddingsAreRefusedWhereThereAreNone) {
  BatcherBench b;
  const Admission a = check_request(embedding(1, 4, Pooling::kMean), b.batcher.limits());
  EXPECT_EQ(a.refusal, Refusal::kInvalid);
  EXPECT_NE(a.message.find("no hidden states"), std::string::npos);
}

TEST(Batcher, OverdueRequestsEndWithWhatTheyHave) {
  BatcherBench b({.pages = 4}, {.max_batch_size = 1});
  Request slow = request(1, 4, 100), waits = request(2, 4, 5);
  slow.timeout_seconds = 0.2;  // the clock moves a millisecond each time it is read
  waits.timeout_seconds = 0.05;
  Recorder &r = b.add(std::move(slow)), &w = b.add(std::move(waits)), &last = b.add(request(3, 4, 5));
  b.run();
  EXPECT_EQ(r.finish().reason, FinishReason::kTimeout);
  EXPECT_GT(r.finish().completion_tokens, 0);
  EXPECT_LT(r.finish().completion_tokens, 100);
  EXPECT_EQ(w.finish().reason, FinishReason::kTimeout);
  EXPECT_EQ(w.finish().completion_tokens, 0);
  EXPECT_EQ(last.finish().reason, FinishReason::kLength);
  EXPECT_EQ(b.batcher.stats().finished[size_t(FinishReason::kTimeout)], 2u);
}

TEST(Batcher, GreedyIsTheSameForAnyBatchAndChunkSize) {
  std::vector<std::vector<int32_t>> want;
  for (uint64_t i = 0; i < 30; ++i) want.push_back(alone(request(i, 1 + int64_t(i * 37 % 190), 40)));
  for (int64_t chunk : {1, 7, 64, 512}) {
    BatcherBench b({.pages = 200}, {.max_batch_size = 12, .prefill_tokens = chunk, .prefill_tokens_beside_decodes = chunk});
    for (uint64_t i = 0; i < 30; ++i) {
      b.add(request(i, 1 + int64_t(i * 37 % 190), 40));
      for (uint64_t k = 0; k < random_u64(chunk, i) % 4; ++k) b.step();  // arrives among running ones
    }
    b.run();
    for (size_t i = 0; i < want.size(); ++i) EXPECT_EQ(b.recorders[i]->tokens(), want[i]) << chunk << " " << i;
  }
}

TEST(Batcher, ATinyPoolPreemptsAndGivesTheSameTokens) {
  BatcherBench b({.pages = 5}, {.max_batch_size = 8});
  std::vector<Request> all;
  for (uint64_t i = 0; i < 12; ++i) {
    Request r = request(i, 40 + int64_t(i * 7), 100);
    if (i % 3 == 1) r.sampling.temperature = 1, r.sampling.seed = i;
    if (i % 3 == 2) r.sampling.frequency_penalty = 1;
    b.add(request(i, 1, 1));  // and short ones between
    b.add(Request{.prompt = r.prompt, .sampling = r.sampling, .max_tokens = 100});
    all.push_back(std::move(r));
  }
  b.run();
  EXPECT_GT(b.batcher.stats().preemptions, 3u);
  for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(b.recorders[2 * i + 1]->tokens(), alone(std::move(all[i]))) << i;
  EXPECT_EQ(b.batcher.stats().kv_pages_used, 0);
}

TEST(Batcher, WhatCanNeverFitIsRefusedWithTheNumbers) {
  BatcherBench b({.pages = 8}, {.max_seq_len = 2048});  // 512 tokens of cache
  Admission a = check_request(request(1, 900, 10), b.batcher.limits());
  EXPECT_EQ(a.refusal, Refusal::kTooLong);
  EXPECT_NE(a.message.find("900"), std::string::npos) << a.message;
  EXPECT_NE(a.message.find("512"), std::string::npos) << a.message;
  EXPECT_EQ(check_request(request(1, 400, 200), b.batcher.limits()).refusal, Refusal::kTooLong);
  EXPECT_EQ(check_request(request(1, 3000, 1), b.batcher.limits()).refusal, Refusal::kTooLong);
  EXPECT_EQ(check_request(request(1, 10, INT64_MAX), b.batcher.limits()).refusal, Refusal::kTooLong);
  EXPECT_EQ(check_request(request(1, 513, 0), b.batcher.limits()).refusal, Refusal::kTooLong);
  EXPECT_TRUE(check_request(request(1, 512, 1), b.batcher.limits()).ok());
  EXPECT_TRUE(check_request(request(1, 512, 0), b.batcher.limits()).ok());
  EXPECT_TRUE(check_request(request(1, 412, 101), b.batcher.limits()).ok());
}

TEST(Batcher, RequestsThatFillThePoolExactlyAndTwoThatWantOverHalf) {
  BatcherBench b({.pages = 8}, {.max_seq_len = 2048});
  b.add(request(1, 512, 1));
  b.add(request(2, 300, 213));
  b.add(request(3, 300, 213));
  Request open = request(4, 100, -1);  // no limit of its own: until the pool is full
  open.sampling.ignore_eos = true;
  b.add(std::move(open));
  for (uint64_t i = 5; i < 10; ++i) b.add(request(i, 5, 5));
  b.run();
  for (auto& r : b.recorders) EXPECT_EQ(r->finish().reason, FinishReason::kLength);
  EXPECT_EQ(b.recorders[3]->tokens().size(), 513u - 100u);
}

TEST(Batcher, EndTokensEndAndAreCounted) {
  LoopOptions o;
  o.eos_ids = {0};
  BatcherBench b({}, o);
  Request r = request(1, 5, 20);
  r.sampling.logit_bias = {{0, 100}};
  Recorder& plain = b.add(Request{.prompt = r.prompt, .sampling = r.sampling, .max_tokens = 20});
  r.sampling.ignore_eos = true;
  Recorder& ignoring = b.add(Request{.prompt = r.prompt, .sampling = r.sampling, .max_tokens = 20});
  r.sampling.ignore_eos = false;
  r.sampling.min_tokens = 3;
  Recorder& minimum = b.add(Request{.prompt = r.prompt, .sampling = r.sampling, .max_tokens = 20});
  Request own = request(2, 5, 20);
  own.sampling.logit_bias = {{9, 100}};
  own.stop_token_ids = {9};
  Recorder& stop = b.add(std::move(own));
  b.run();
  EXPECT_EQ(plain.tokens(), std::vector<int32_t>{0});
  EXPECT_TRUE(plain.events()[0].end);
  EXPECT_EQ(plain.text(), "");
  EXPECT_EQ(plain.finish().reason, FinishReason::kStop);
  EXPECT_EQ(plain.finish().stop_token, 0);
  EXPECT_EQ(plain.finish().completion_tokens, 1);
  EXPECT_EQ(ignoring.tokens(), std::vector<int32_t>(20, 0));
  EXPECT_EQ(ignoring.finish().reason, FinishReason::kLength);
  EXPECT_EQ(minimum.tokens().size(), 4u);
  EXPECT_EQ(minimum.tokens().back(), 0);
  EXPECT_EQ(stop.finish().stop_token, 9);
}

TEST(Batcher, StopStringsCutTheTextAndCountTheTokens) {
  const std::vector<int32_t> tokens = alone(request(3, 9, 30));
  std::string whole;
  std::vector<size_t> starts;
  for (int32_t t : tokens) {
    starts.push_back(whole.size());
    if (!tokenizer()->is_special(t)) whole += tokenizer()->token_bytes(t);
  }
  const std::string stop = whole.substr(7, 5);
  const size_t at = whole.find(stop);
  BatcherBench b;
  Request r = request(3, 9, 30);
  r.stop = {"never that", stop};
  Recorder& cut = b.add(std::move(r));
  Request half = request(3, 9, 30);
  half.stop = {whole.substr(whole.size() - 3) + "!"};  // held at the end, then flushed
  Recorder& flushed = b.add(std::move(half));
  b.run();
  EXPECT_EQ(cut.text(), whole.substr(0, at));
  EXPECT_EQ(cut.finish().reason, FinishReason::kStop);
  EXPECT_EQ(cut.finish().stop_string, stop);
  const int64_t made =
      int64_t(std::count_if(starts.begin(), starts.end(), [&](size_t s) { return s < at + stop.size(); }));
  EXPECT_EQ(cut.finish().completion_tokens, made);
  EXPECT_EQ(flushed.text(), whole);
  EXPECT_EQ(flushed.finish().reason, FinishReason::kLength);
}

TEST(Batcher, PromptScoresEqualGenerationScores) {
  for (int64_t chunk : {1, 5, 512}) {
    BatcherBench b({}, {.prefill_tokens = chunk, .prefill_tokens_beside_decodes = chunk});
    Request r = request(4, 20, 10);
    r.sampling.logprobs = 3;
    std::vector<int32_t> prompt = r.prompt;
    Recorder& made = b.add(std::move(r));
    b.run();
    Request score;
    score.prompt = prompt;
    for (int32_t t : made.tokens()) score.prompt.push_back(t);
    score.max_tokens = 0;
    score.prompt_logprobs = true;
    score.sampling.logprobs = 3;
    Recorder& scored = b.add(std::move(score));
    b.run();
    EXPECT_EQ(scored.finish().reason, FinishReason::kLength);
    EXPECT_EQ(scored.finish().completion_tokens, 0);
    EXPECT_EQ(scored.tokens().size(), 0u);
    std::vector<ScoredToken> p = scored.prompt();
    ASSERT_EQ(p.size(), 30u);
    EXPECT_TRUE(p[0].top.empty());
    EXPECT_EQ(p[0].token, prompt[0]);
    for (size_t i = 0; i < 10; ++i) {
      EXPECT_EQ(p[20 + i].token, made.events()[i].token);
      EXPECT_EQ(p[20 + i].logprob, made.events()[i].logprob);
      ASSERT_EQ(p[20 + i].top.size(), 3u);
      EXPECT_EQ(p[20 + i].top[0].token, made.events()[i].top[0].token);
    }
  }
}

TEST(Batcher, PromptScoresSurviveAPreemption) {
  auto play = [](int64_t pages) {
    BatcherBench b({.pages = pages}, {.prefill_tokens = 16, .prefill_tokens_beside_decodes = 16});
    b.add(request(1, 120, 120));
    Request r = request(2, 100, 60);
    r.prompt_logprobs = true;
    r.sampling.logprobs = 1;
    Recorder& rec = b.add(std::move(r));
    b.run();
    std::vector<float> scores;
    for (auto& s : rec.prompt()) scores.push_back(s.logprob);
    return std::tuple(scores, rec.tokens(), b.batcher.stats().preemptions);
  };
  auto [small, small_tokens, preemptions] = play(5);
  auto [big, big_tokens, none] = play(100);
  EXPECT_GT(preemptions, 0u);
  EXPECT_EQ(none, 0u);
  EXPECT_EQ(small, big);
  EXPECT_EQ(small_tokens, big_tokens);
}

TEST(Batcher, CancelFreesPagesAtOnceWaitingAndRunning) {
  BatcherBench b({.pages = 4}, {.max_batch_size = 2});
  for (uint64_t i = 0; i < 4; ++i) b.add(request(i, 60, 100));
  b.step();
  b.step();
  EXPECT_GT(b.batcher.stats().kv_pages_used, 0);
  for (uint64_t id : {4u, 1u, 2u, 77u, 3u, 1u}) b.batcher.cancel(id);
  EXPECT_EQ(b.batcher.stats().kv_pages_used, 0);
  EXPECT_EQ(b.batcher.stats().running + b.batcher.stats().waiting, 0);
  b.batcher.deliver_ended();
  for (auto& r : b.recorders) EXPECT_EQ(r->finish().reason, FinishReason::kCancelled);
  EXPECT_FALSE(b.step());
}

TEST(Batcher, BrokenLogitsEndTheRequestWithAnError) {
  BatcherBench b({.break_logits = true});
  Recorder& r = b.add(request(1, 5, 5));
  b.run();
  EXPECT_EQ(r.finish().reason, FinishReason::kError);
  EXPECT_NE(r.finish().message, "");
}

// Allows the letters of a word in turn, then ends.
class WordConstraint : public text::Constraint {
 public:
  explicit WordConstraint(std::vector<int32_t> ids, bool refuse = false, bool fail = false)
      : ids_(std::move(ids)), refuse_(refuse), fail_(fail) {}
  std::unique_ptr<text::Constraint> clone() const override { return std::make_unique<WordConstraint>(*this); }
  bool fill_mask(std::span<uint32_t> mask) override {
    std::fill(mask.begin(), mask.end(), 0);
    if (at_ == ids_.size()) return false;
    mask[size_t(ids_[at_] / 32)] |= 1u << (ids_[at_] % 32);
    return true;
  }
  Status accept(int32_t token) override {
    if (refuse_ || token != ids_[at_]) return bad_input("unexpected token {}", token);
    ++at_;
    return {};
  }
  bool finished() const override { return !fail_ && at_ == ids_.size(); }
  Status failure() const override {
    if (fail_ && at_ == ids_.size()) return bad_input("too large");
    return {};
  }

 private:
  std::vector<int32_t> ids_;
  bool refuse_, fail_;
  size_t at_ = 0;
};

TEST(Batcher, AConstraintDecidesTheTokensAndTheEnd) {
  BatcherBench b;
  Request r = request(1, 5, 50);
  r.constraint = std::make_unique<WordConstraint>(std::vector<int32_t>{3, 1, 20, 40});
  Recorder& word = b.add(std::move(r));
  Request bad = request(2, 5, 50);
  bad.constraint = std::make_unique<WordConstraint>(std::vector<int32_t>{3}, true);
  Recorder& refused = b.add(std::move(bad));
  Request empty = request(3, 5, 50);
  empty.constraint = std::make_unique<WordConstraint>(std::vector<int32_t>{});
  Recorder& ended = b.add(std::move(empty));
  Recorder& free = b.add(request(4, 5, 10));
  b.run();
  EXPECT_EQ(word.tokens(), (std::vector<int32_t>{3, 1, 20, 40}));
  EXPECT_EQ(word.finish().reason, FinishReason::kStop);
  EXPECT_EQ(refused.finish().reason, FinishReason::kInvalid);
  EXPECT_EQ(ended.finish().reason, FinishReason::kStop);
  EXPECT_EQ(ended.finish().completion_tokens, 0);
  EXPECT_EQ(free.tokens(), alone(request(4, 5, 10)));
}

// Goes on, and allows nothing.
class DeadEnd : public WordConstraint {
 public:
  DeadEnd() : WordConstraint({3}) {}
  bool fill_mask(std::span<uint32_t> mask) override {
    std::fill(mask.begin(), mask.end(), 0);
    return true;
  }
};

TEST(Batcher, AConstraintThatFailsIsNoEndOfTheText) {
  BatcherBench b;
  Request r = request(1, 5, 50);
  r.constraint = std::make_unique<WordConstraint>(std::vector<int32_t>{3, 1}, false, true);
  Recorder& failed = b.add(std::move(r));
  Request banned = request(2, 5, 50);
  banned.constraint = std::make_unique<DeadEnd>();
  Recorder& nothing = b.add(std::move(banned));
  b.run();
  EXPECT_EQ(failed.tokens(), (std::vector<int32_t>{3, 1}));
  EXPECT_EQ(failed.finish().reason, FinishReason::kInvalid);
  EXPECT_EQ(failed.finish().message, "too large");
  EXPECT_EQ(nothing.finish().reason, FinishReason::kInvalid);
  EXPECT_EQ(b.batcher.stats().finished[size_t(FinishReason::kInvalid)], 2u);
  EXPECT_EQ(b.batcher.stats().finished[size_t(FinishReason::kError)], 0u);
}

// "bc" was complete but waited for "abcd", which starts earlier; the limit came first.
TEST(Batcher, AStopStringThatIsDecidedByTheLimitIsAStop) {
  BatcherBench b;
  Request r = request(1, 5, 3);
  r.constraint = std::make_unique<WordConstraint>(std::vector<int32_t>{1, 2, 3, 4});
  r.stop = {"bc", "abcd"};
  Recorder& rec = b.add(std::move(r));
  b.run();
  EXPECT_EQ(rec.text(), "a");
  EXPECT_EQ(rec.finish().reason, FinishReason::kStop);
  EXPECT_EQ(rec.finish().stop_string, "bc");
}

TEST(Batcher, MixedSettingsEqualAloneInEveryOrder) {
  auto make = [](size_t i) {
    Request r = request(i, 30 + int64_t(i), 25);
    SamplingParams& s = r.sampling;
    if (i == 0) s.repetition_penalty = 2;
    if (i == 1) s.temperature = 1, s.seed = 5, s.top_k = 1;
    if (i == 2) s.temperature = 1e-6;
    if (i == 3) s.temperature = 1, s.seed = 6, s.top_p = 0;
    if (i == 4) s.temperature = 1, s.seed = 7, s.top_k = 1000000;
    if (i == 5) s.temperature = 1, s.seed = 8, s.min_p = 1;
    if (i == 6) s.presence_penalty = -2, s.logprobs = 20;
    if (i == 7) {
      for (int32_t t = 0; t < 64; ++t) {
        if (t != 33) s.logit_bias.push_back({t, -100});
      }
    }
    return r;
  };
  std::vector<std::vector<int32_t>> want;
  for (size_t i = 0; i < 8; ++i) want.push_back(alone(make(i)));
  std::vector<size_t> order = {0, 1, 2, 3, 4, 5, 6, 7};
  for (uint64_t shuffle = 0; shuffle < 10; ++shuffle) {
    for (size_t i = 7; i > 0; --i) std::swap(order[i], order[random_u64(shuffle, i) % (i + 1)]);
    BatcherBench b({.pages = 200});
    for (size_t i : order) b.add(make(i));
    b.run();
    for (size_t k = 0; k < 8; ++k) EXPECT_EQ(b.recorders[k]->tokens(), want[order[k]]);
  }
}

TEST(Batcher, RequestsWithoutASeedDiffer) {
  BatcherBench b;
  for (int i = 0; i < 4; ++i) {
    Request r = request(1, 5, 20);
    r.sampling.temperature = 1.5;
    b.add(std::move(r));
  }
  b.run();
  EXPECT_NE(b.recorders[0]->tokens(), b.recorders[1]->tokens());
  EXPECT_NE(b.recorders[2]->tokens(), b.recorders[3]->tokens());
}

// Random everything, by hand: invariants after each step (in BatcherBench::step), one end each, sums agree.
TEST(Batcher, RandomTrafficKeepsItsBooks) {
  for (uint64_t seed = 0; seed < 25; ++seed) {
    testing::Pick pick(seed);
    LoopOptions o;
    o.max_batch_size = pick(1, 8);
    o.prefill_tokens = pick(1, 100);
    o.prefill_tokens_beside_decodes = pick(1, 100);
    o.eos_ids = {0};
    BatcherBench b({.pages = pick(4, 12), .max_tokens = 128}, o);
    int64_t to_come = 40;
    while (to_come > 0 || !b.batcher.idle()) {
      if (to_come > 0 && pick(0, 2) == 0) {
        Request r = request(uint64_t(to_come), pick(1, 150), pick(0, 60));
        if (pick(0, 1)) r.sampling.temperature = 1;
        if (pick(0, 3) == 0) r.stop = {"ab", "c"};
        if (pick(0, 3) == 0) r.prompt_logprobs = true;
        if (pick(0, 3) == 0) r.sampling.logprobs = 2;
        b.add(std::move(r));
        --to_come;
      }
      if (pick(0, 20) == 0) b.batcher.cancel(uint64_t(pick(1, 40)));
      b.step();
    }
    uint64_t tokens = 0, ends = 0;
    for (auto& r : b.recorders) {
      EXPECT_TRUE(r->ended());
      EXPECT_EQ(r->finish().completion_tokens, int64_t(r->tokens().size()));
      tokens += r->tokens().size();
    }
    const Stats& s = b.batcher.stats();
    for (uint64_t f : s.finished) ends += f;
    EXPECT_EQ(ends, 40u);
    EXPECT_EQ(s.e2e.count, 40u);
    EXPECT_EQ(tokens, s.generated_tokens);
    EXPECT_EQ(s.ttft.count + s.inter_token.count, tokens);
    EXPECT_EQ(s.kv_pages_used, 0);
    EXPECT_EQ(s.finished[size_t(FinishReason::kError)], 0u);
  }
}

}  // namespace
}  // namespace mi::runtime
