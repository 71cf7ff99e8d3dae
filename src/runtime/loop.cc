#include "runtime/loop.h"

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "runtime/batcher.h"

namespace mi::runtime {

namespace {
double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
uint64_t random_seed() {
  std::random_device device;
  return uint64_t(device()) << 32 | device();
}
}  // namespace

// mu guards everything but the batcher, which belongs to the thread. Callers only leave notes (arrived, cancelled) and
// read the copy of the stats; the thread takes the notes between two steps and holds mu for moves and copies only.
struct EngineLoop::Impl {
  Impl(std::unique_ptr<Stepper> s, std::shared_ptr<const text::Tokenizer> t, LoopOptions o)
      : stepper(std::move(s)),
        has_text(t != nullptr),
        options(fit_options(std::move(o), *stepper)),
        batcher(*stepper, std::move(t), options, random_seed(), steady_seconds),
        published(batcher.stats()),
        free_places(options.max_batch_size) {}

  struct Arrived {
    uint64_t id;
    Request request;
    Sink sink;
    double at;
  };

  std::unique_ptr<Stepper> stepper;
  const bool has_text;
  const LoopOptions options;
  Batcher batcher;

  mutable std::mutex mu;
  std::condition_variable wake;      // the thread: there are notes
  std::condition_variable all_done;  // drain: in_flight became 0, or nothing is unsaved
  std::vector<Arrived> arrived;
  std::vector<uint64_t> cancelled;
  bool cancel_everything = false;
  bool draining = false;
  bool stopping = false;
  uint64_t next_id = 1;
  int64_t in_flight = 0;  // accepted and not finished
  bool unsaved = false;   // as of Batcher
  uint64_t accepted = 0;
  std::array<uint64_t, 5> refused{};
  Stats published;
  std::map<int64_t, int64_t> queue;  // how many wait, by priority
  int64_t free_places = 0;           // in the batch, for the first of them
  double progress_at = steady_seconds();
  std::thread thread;

  void run();
  void publish();
  Admission check(const Request& r) const;
  double expected_wait(int64_t priority) const;
};

Admission EngineLoop::Impl::check(const Request& r) const {
  Admission a = check_request(r, batcher.limits());
  if (a.ok() && !has_text && !r.stop.empty()) {
    a.refusal = Refusal::kInvalid;
    a.param = "stop";
    a.message = "stop strings need a tokenizer and this engine has none";
  }
  return a;
}

// Under mu. Until the first step of a request that comes now; 0 if there is a place for it, or nothing is known.
double EngineLoop::Impl::expected_wait(int64_t priority) const {
  return double(starts_until(queue, priority, free_places)) * published.seconds_per_start;
}

// The numbers first, then the last events, then whoever waits for the end.
void EngineLoop::Impl::publish() {
  {
    std::lock_guard lock(mu);
    published = batcher.stats();
    queue = batcher.queue();
    // Where some wait although there are places, it is not places that they wait for.
    free_places = queue.empty() ? options.max_batch_size - published.running : 0;
    for (const Arrived& a : arrived) ++queue[a.request.priority];
    progress_at = steady_seconds();
    if (std::exchange(unsaved, batcher.unsaved()) && !unsaved) all_done.notify_all();
  }
  if (!batcher.deliver_ended()) return;
  std::lock_guard lock(mu);
  uint64_t finished = 0;
  for (uint64_t n : published.finished) finished += n;
  in_flight = int64_t(accepted - finished);
  if (in_flight == 0) all_done.notify_all();
}

void EngineLoop::Impl::run() {
  for (;;) {
    std::vector<Arrived> in;
    std::vector<uint64_t> out;
    bool all = false, stop = false;
    {
      std::unique_lock lock(mu);
      wake.wait(lock, [&] {
        return stopping || cancel_everything || !arrived.empty() || !cancelled.empty() || !batcher.idle() ||
               batcher.unsaved();
      });
      in.swap(arrived);
      out.swap(cancelled);
      all = std::exchange(cancel_everything, false);
      stop = stopping;
      published.waiting += int64_t(in.size());  // until the next publish()
    }
    for (Arrived& a : in) batcher.add(a.id, std::move(a.request), std::move(a.sink), a.at);
    for (uint64_t id : out) batcher.cancel(id);
    if (all || stop) batcher.cancel_all();
    batcher.step();
    publish();
    if (stop) return;
  }
}

EngineLoop::EngineLoop(std::unique_ptr<Stepper> stepper, std::shared_ptr<const text::Tokenizer> tokenizer,
                       LoopOptions options)
    : impl_(std::make_unique<Impl>(std::move(stepper), std::move(tokenizer), std::move(options))) {
  impl_->thread = std::thread([impl = impl_.get()] { impl->run(); });
}

EngineLoop::~EngineLoop() {
  {
    std::lock_guard lock(impl_->mu);
    impl_->draining = impl_->stopping = true;
  }
  impl_->wake.notify_one();
  impl_->thread.join();
}

Admission EngineLoop::submit(Request r, Sink sink) {
  Impl& m = *impl_;
  Admission a = m.check(r);
  std::lock_guard lock(m.mu);
  if (m.draining) {
    a.refusal = Refusal::kDraining;
    a.message = "the server is shutting down";
  } else if (a.ok() && m.options.max_waiting > 0 && m.in_flight >= m.options.max_batch_size + m.options.max_waiting) {
    a.refusal = Refusal::kQueueFull;
    a.message = fmt::format("{} requests are in work or waiting and no more are taken ({} run at once, {} may wait)",
                            m.in_flight, m.options.max_batch_size, m.options.max_waiting);
    a.retry_after = m.published.seconds_per_start;
  } else if (a.ok() && m.options.max_queue_seconds > 0) {
    const double wait = m.expected_wait(r.priority);
    if (wait > m.options.max_queue_seconds) {
      a.refusal = Refusal::kQueueFull;
      a.message =
          fmt::format("a request that comes now would wait for about {:.0f} s, and no more than {:g} s are allowed",
                      std::ceil(wait), m.options.max_queue_seconds);
      a.retry_after = wait - m.options.max_queue_seconds;
    }
  }
  if (!a.ok()) {
    ++m.refused[size_t(a.refusal)];
    return a;
  }
  if (m.in_flight == 0) m.progress_at = steady_seconds();  // the thread was asleep, not stuck
  a.id = m.next_id++;
  ++m.accepted;
  ++m.in_flight;
  ++m.queue[r.priority];
  m.arrived.push_back({a.id, std::move(r), std::move(sink), steady_seconds()});
  m.wake.notify_one();
  return a;
}

void EngineLoop::cancel(uint64_t id) {
  std::lock_guard lock(impl_->mu);
  impl_->cancelled.push_back(id);
  impl_->wake.notify_one();
}

void EngineLoop::stop_accepting() {
  std::lock_guard lock(impl_->mu);
  impl_->draining = true;
}

bool EngineLoop::drain(std::chrono::milliseconds limit) {
  Impl& m = *impl_;
  std::unique_lock lock(m.mu);
  m.draining = true;
  const auto until = std::chrono::steady_clock::now() + limit;
  auto done = [&m] { return m.in_flight == 0; };
  const bool finished = m.all_done.wait_until(lock, until, done);
  if (!finished) {
    m.cancel_everything = true;
    m.wake.notify_one();
    m.all_done.wait(lock, done);
  }
  m.all_done.wait_until(lock, until, [&m] { return !m.unsaved; });
  return finished;
}

Stats EngineLoop::stats() const {
  const Impl& m = *impl_;
  std::lock_guard lock(m.mu);
  Stats s = m.published;
  s.waiting += int64_t(m.arrived.size());
  s.expected_wait = m.expected_wait(0);
  s.accepted = m.accepted;
  s.refused = m.refused;
  s.draining = m.draining;
  s.seconds_since_progress = m.in_flight > 0 ? steady_seconds() - m.progress_at : 0;
  return s;
}

const Limits& EngineLoop::limits() const { return impl_->batcher.limits(); }

}  // namespace mi::runtime
