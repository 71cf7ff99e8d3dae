#include "runtime/loop.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <cmath>
#include <future>

#include "runtime/generate.h"
#include "runtime/testing.h"

namespace mi::runtime {
namespace {

using testing::FakeStepper;
using testing::Recorder;
using testing::request;
using namespace std::chrono_literals;

std::unique_ptr<EngineLoop> make_loop(const FakeStepper::Config& c = {}, LoopOptions o = {}) {
  return std::make_unique<EngineLoop>(std::make_unique<FakeStepper>(c), nullptr, std::move(o));
}
void expect_all_back(const Stats& s) {
  uint64_t ends = 0;
  for (uint64_t f : s.finished) ends += f;
  EXPECT_EQ(ends, s.accepted);
  EXPECT_EQ(s.running, 0);
  EXPECT_EQ(s.waiting, 0);
  EXPECT_EQ(s.kv_pages_used, 0);
}

TEST(EngineLoop, NumbersAreFreshWhenTheLastEventArrives) {
  auto loop = make_loop();
  Recorder r;
  std::atomic<int64_t> running{-1};
  auto inner = r.sink();
  Admission a = loop->submit(request(1, 10, 5), [&](Event&& e) {
    if (std::holds_alternative<FinishEvent>(e)) running = loop->stats().running;
    inner(std::move(e));
  });
  ASSERT_TRUE(a.ok());
  EXPECT_NE(a.id, 0u);
  r.wait_end();
  EXPECT_EQ(running, 0);
  EXPECT_EQ(loop->stats().kv_pages_used, 0);
  EXPECT_EQ(loop->stats().generated_tokens, 5u);
}

TEST(EngineLoop, RefusalsCauseNoEventAndAreCounted) {
  auto loop = make_loop({.pages = 4}, {.max_batch_size = 1, .max_waiting = 1});
  auto never = [](Event&&) { FAIL(); };
  Admission a = loop->submit(request(1, 5000, 5), never);
  EXPECT_EQ(a.refusal, Refusal::kTooLong);
  EXPECT_EQ(a.id, 0u);
  EXPECT_EQ(loop->submit(Request{}, never).refusal, Refusal::kInvalid);
  Request with_stop = request(1, 5, 5);
  with_stop.stop = {"x"};
  EXPECT_EQ(loop->submit(std::move(with_stop), never).param, "stop");

  std::promise<void> gate;
  std::shared_future<void> open(gate.get_future());
  Recorder r1, r2;
  auto inner = r1.sink();
  EXPECT_TRUE(loop->submit(request(1, 5, 5),
                           [&, open](Event&& e) {
                             open.wait();
                             inner(std::move(e));
                           })
                  .ok());
  EXPECT_TRUE(loop->submit(request(2, 5, 5), r2.sink()).ok());
  Admission full = loop->submit(request(3, 5, 5), never);
  EXPECT_EQ(full.refusal, Refusal::kQueueFull);
  gate.set_value();
  r1.wait_end();
  r2.wait_end();
  loop->stop_accepting();
  EXPECT_EQ(loop->submit(request(1, 5, 5), never).refusal, Refusal::kDraining);
  Stats s = loop->stats();
  EXPECT_EQ(s.refused[size_t(Refusal::kTooLong)], 1u);
  EXPECT_EQ(s.refused[size_t(Refusal::kInvalid)], 2u);
  EXPECT_EQ(s.refused[size_t(Refusal::kQueueFull)], 1u);
  EXPECT_EQ(s.refused[size_t(Refusal::kDraining)], 1u);
  EXPECT_EQ(s.accepted, 2u);
}

// The limit of a nanosecond is shorter than any wait that is known.
TEST(EngineLoop, WhoWouldWaitTooLongIsRefusedAtOnceAndToldWhenToComeBack) {
  std::mutex mu;
  std::condition_variable changed;
  int64_t steps = 0, allowed = 0;
  FakeStepper::Config c{.pages = 64};
  c.on_step = [&] {
    std::unique_lock lock(mu);
    ++steps;
    changed.notify_all();
    changed.wait(lock, [&] { return steps <= allowed; });
  };
  const auto allow = [&](int64_t n) {
    std::unique_lock lock(mu);
    allowed = n;
    changed.notify_all();
    changed.wait(lock, [&] { return steps > allowed; });
  };
  auto loop = make_loop(c, {.max_batch_size = 1, .max_queue_seconds = 1e-9});
  std::vector<Recorder> r(6);
  for (size_t i = 0; i < 5; ++i)
    EXPECT_TRUE(loop->submit(request(i, 5, 2), r[i].sink()).ok()) << "how quickly the queue moves is not known yet";
  EXPECT_EQ(loop->stats().expected_wait, 0);
  allow(4);  // two are done, the third is in its first step, and it and the second started while others waited
  EXPECT_EQ(loop->stats().waiting, 3);
  EXPECT_GT(loop->stats().expected_wait, 0);
  const Admission late = loop->submit(request(9, 5, 2), [](Event&&) { FAIL(); });
  EXPECT_EQ(late.refusal, Refusal::kQueueFull);
  EXPECT_GT(late.retry_after, 0);
  EXPECT_NE(late.message.find("would wait"), std::string::npos);
  EXPECT_EQ(loop->stats().refused[size_t(Refusal::kQueueFull)], 1u);
  {
    std::lock_guard lock(mu);
    allowed = 1000;
    changed.notify_all();
  }
  for (size_t i = 0; i < 5; ++i) r[i].wait_end();
  EXPECT_TRUE(loop->submit(request(10, 5, 2), r[5].sink()).ok()) << "the place is free";
  r[5].wait_end();
  expect_all_back(loop->stats());
}

TEST(EngineLoop, BadParametersAreNamed) {
  Limits limits{64, 4096, 4096};
  auto param = [&](auto&& change) {
    Request r = request(1, 5, 5);
    change(r);
    Admission a = check_request(r, limits);
    EXPECT_NE(a.ok(), !a.param.empty());
    return a.param;
  };
  EXPECT_EQ(param([](Request&) {}), "");
  EXPECT_EQ(param([](Request& r) { r.sampling.temperature = -1; }), "temperature");
  EXPECT_EQ(param([](Request& r) { r.sampling.temperature = std::nan(""); }), "temperature");
  EXPECT_EQ(param([](Request& r) { r.sampling.top_p = 1.5; }), "top_p");
  EXPECT_EQ(param([](Request& r) { r.sampling.top_p = 0; }), "");
  EXPECT_EQ(param([](Request& r) { r.sampling.min_p = std::nan(""); }), "min_p");
  EXPECT_EQ(param([](Request& r) { r.sampling.presence_penalty = 5; }), "presence_penalty");
  EXPECT_EQ(param([](Request& r) { r.sampling.frequency_penalty = -5; }), "frequency_penalty");
  EXPECT_EQ(param([](Request& r) { r.sampling.repetition_penalty = 0; }), "repetition_penalty");
  EXPECT_EQ(param([](Request& r) { r.sampling.top_k = -2; }), "top_k");
  EXPECT_EQ(param([](Request& r) { r.sampling.logit_bias = {{64, 1}}; }), "logit_bias");
  EXPECT_EQ(param([](Request& r) { r.sampling.logit_bias = {{1, 101}}; }), "logit_bias");
  EXPECT_EQ(param([](Request& r) { r.sampling.logprobs = 21; }), "logprobs");
  EXPECT_EQ(param([](Request& r) { r.sampling.min_tokens = 6; }), "min_tokens");
  EXPECT_EQ(param([](Request& r) { r.max_tokens = -5; }), "max_tokens");
  EXPECT_EQ(param([](Request& r) { r.max_tokens = 5000; }), "max_tokens");
  EXPECT_EQ(param([](Request& r) { r.stop = {""}; }), "stop");
  EXPECT_EQ(param([](Request& r) { r.stop_token_ids = {-1}; }), "stop_token_ids");
  EXPECT_EQ(param([](Request& r) { r.prompt[2] = 64; }), "prompt");
  EXPECT_EQ(param([](Request& r) { r.prompt.clear(); }), "prompt");
}

TEST(EngineLoop, ManyThreadsSubmitAndCancel) {
  auto loop = make_loop({.pages = 12}, {.max_batch_size = 6});
  constexpr int kThreads = 4, kEach = 60;
  std::vector<std::unique_ptr<Recorder>> recorders;
  for (int i = 0; i < kThreads * kEach; ++i) recorders.push_back(std::make_unique<Recorder>());
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::vector<uint64_t> ids;
      for (int i = 0; i < kEach; ++i) {
        const uint64_t draw = random_u64(uint64_t(t), uint64_t(i));
        Admission a = loop->submit(request(draw, 1 + int64_t(draw % 100), 1 + int64_t(draw / 100 % 60)),
                                   recorders[size_t(t * kEach + i)]->sink());
        ASSERT_TRUE(a.ok()) << a.message;
        ids.push_back(a.id);
        if (draw % 3 == 0) loop->cancel(ids[draw / 7 % ids.size()]);
        if (draw % 5 == 0) (void)loop->stats();
      }
    });
  }
  for (auto& t : threads) t.join();
  for (auto& r : recorders) r->wait_end();
  EXPECT_TRUE(loop->drain(10s));
  Stats s = loop->stats();
  expect_all_back(s);
  EXPECT_EQ(s.accepted, uint64_t(kThreads * kEach));
  uint64_t tokens = 0;
  for (auto& r : recorders) tokens += r->tokens().size();
  EXPECT_EQ(tokens, s.generated_tokens);
}

TEST(EngineLoop, CancelStormEmptiesTheGauges) {
  auto loop = make_loop({.pages = 200, .step_time = 1ms}, {.max_batch_size = 10});
  std::vector<std::unique_ptr<Recorder>> recorders;
  std::vector<uint64_t> ids;
  for (uint64_t i = 0; i < 20; ++i) {
    recorders.push_back(std::make_unique<Recorder>());
    ids.push_back(loop->submit(request(i, 20, 1500), recorders.back()->sink()).id);
  }
  for (size_t i = 0; i < 10; ++i) recorders[i]->wait_tokens(2);
  EXPECT_EQ(loop->stats().running, 10);
  EXPECT_EQ(loop->stats().waiting, 10);
  for (uint64_t id : ids) loop->cancel(id);
  for (auto& r : recorders) r->wait_end();
  Stats s = loop->stats();
  expect_all_back(s);
  EXPECT_EQ(s.finished[size_t(FinishReason::kCancelled)], 20u);
}

// The step is stuck until the test opens it: a call that waited for it would hang here.
TEST(EngineLoop, EverythingAnswersWhileAStepRuns) {
  std::promise<void> gate, inside;
  std::shared_future<void> open(gate.get_future());
  std::atomic<bool> entered{false};
  auto loop = make_loop({.on_step = [&] {
    if (!entered.exchange(true)) inside.set_value();
    open.wait();
  }});
  Recorder r, other;
  ASSERT_TRUE(loop->submit(request(1, 5, 2), r.sink()).ok());
  inside.get_future().wait();
  Stats s = loop->stats();
  EXPECT_EQ(s.running + s.waiting, 1);
  EXPECT_EQ(s.steps, 0u);
  Admission a = loop->submit(request(2, 5, 2), other.sink());
  EXPECT_TRUE(a.ok());
  s = loop->stats();
  EXPECT_EQ(s.running + s.waiting, 2);
  EXPECT_GT(s.seconds_since_progress, 0);
  loop->cancel(a.id);
  gate.set_value();
  r.wait_end();
  other.wait_end();
  EXPECT_EQ(r.finish().reason, FinishReason::kLength);
  EXPECT_EQ(other.finish().reason, FinishReason::kCancelled);
}

TEST(EngineLoop, DrainFinishesRunningWorkOrCancelsAtTheLimit) {
  auto loop = make_loop({.step_time = 1ms});
  Recorder a;
  ASSERT_TRUE(loop->submit(request(1, 5, 30), a.sink()).ok());
  EXPECT_TRUE(loop->drain(60s));
  ASSERT_TRUE(a.ended());
  EXPECT_EQ(a.finish().reason, FinishReason::kLength);

  auto slow = make_loop({.pages = 64, .step_time = 5ms});
  Recorder b;
  ASSERT_TRUE(slow->submit(request(1, 5, 3000), b.sink()).ok());
  EXPECT_FALSE(slow->drain(20ms));
  ASSERT_TRUE(b.ended());
  EXPECT_EQ(b.finish().reason, FinishReason::kCancelled);
}

TEST(EngineLoop, DestructionEndsEveryRequest) {
  std::vector<std::unique_ptr<Recorder>> recorders;
  {
    auto loop = make_loop({.step_time = 1ms}, {.max_batch_size = 2});
    for (uint64_t i = 0; i < 6; ++i) {
      recorders.push_back(std::make_unique<Recorder>());
      ASSERT_TRUE(loop->submit(request(i, 5, 1000), recorders.back()->sink()).ok());
    }
  }
  for (auto& r : recorders) EXPECT_EQ(r->finish().reason, FinishReason::kCancelled);
}

TEST(EngineLoop, SinksMaySubmitAndCancel) {
  auto loop = make_loop();
  Recorder first, second;
  auto inner = first.sink();
  ASSERT_TRUE(loop->submit(request(1, 5, 3),
                           [&](Event&& e) {
                             if (std::holds_alternative<FinishEvent>(e)) {
                               Admission a = loop->submit(request(2, 5, 1000), second.sink());
                               loop->cancel(a.id);
                             }
                             inner(std::move(e));
                           })
                  .ok());
  first.wait_end();
  second.wait_end();
  EXPECT_EQ(second.finish().reason, FinishReason::kCancelled);
}

TEST(EngineLoop, IdleUsesNoCpu) {
  auto loop = make_loop();
  Recorder r;
  ASSERT_TRUE(loop->submit(request(1, 5, 3), r.sink()).ok());
  r.wait_end();
  std::this_thread::sleep_for(20ms);
  auto cpu_ms = [] {
    rusage u{};
    getrusage(RUSAGE_SELF, &u);
    return (u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1000 + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1000;
  };
  const long before = cpu_ms();
  std::this_thread::sleep_for(400ms);
  EXPECT_LT(cpu_ms() - before, 100);  // one that spins uses up to 400
}

TEST(Generate, ManyPromptsThroughOneLoop) {
  auto loop = make_loop({.pages = 64}, {.max_batch_size = 7});
  std::vector<Request> requests, again;
  for (uint64_t i = 0; i < 25; ++i) {
    requests.push_back(request(i, 3 + int64_t(i), 12));
    requests.back().sampling.logprobs = 1;
    requests.back().prompt_logprobs = i == 3;
    again.push_back(request(i, 3 + int64_t(i), 12));
  }
  std::atomic<int> events{0};
  auto r = generate(*loop, std::move(requests), [&](size_t, const Event&) { ++events; });
  ASSERT_TRUE(r.ok());
  EXPECT_EQ(events, 25 * 13 + 1);
  for (size_t i = 0; i < 25; ++i) {
    std::vector<Request> one;
    one.push_back(std::move(again[i]));
    auto single = generate(*loop, std::move(one));
    EXPECT_EQ((*r)[i].tokens, (*single)[0].tokens);
    EXPECT_EQ((*r)[i].tokens.size(), 12u);
    EXPECT_EQ((*r)[i].scores.size(), 12u);
    EXPECT_EQ((*single)[0].scores.size(), 0u);
    EXPECT_EQ((*r)[i].prompt.size(), i == 3 ? 6u : 0u);
  }
}

TEST(Generate, ARefusedPromptIsAnErrorAndStopsTheOthers) {
  auto loop = make_loop({.step_time = 1ms});
  std::vector<Request> requests;
  requests.push_back(request(1, 5, 2000));
  requests.push_back(request(1, 5, 2000));
  requests.push_back(request(1, 5000, 5));
  auto r = generate(*loop, std::move(requests));
  ASSERT_FALSE(r.ok());
  EXPECT_EQ(r.error().code(), ErrorCode::kUsage);
  EXPECT_NE(r.error().message().find("prompt 2"), std::string::npos);
  expect_all_back(loop->stats());
}

}  // namespace
}  // namespace mi::runtime
