#include "hw/thread_pool.h"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "base/check.h"

namespace mi::hw {
namespace {

// A decode step calls the pool every few tens of microseconds; sleeping in between would cost more than the job.
constexpr std::chrono::microseconds kSpin{50};

inline void relax() { __builtin_ia32_pause(); }

void pin_to(int index) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof mask, &mask) != 0) return;
  for (int cpu = 0, seen = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &mask) || seen++ != index) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof one, &one);
    return;
  }
}

}  // namespace

struct ThreadPool::Impl {
  // A job is published by raising `generation`; workers take tasks by counting `next` up, and report by counting
  // `running` down. The caller returns when no worker is inside the job, so fn outlives every use.
  std::vector<std::thread> workers;
  std::atomic<uint64_t> generation{0};
  std::atomic<int64_t> next{0};
  std::atomic<int> running{0};
  std::atomic<bool> stop{false};
  std::atomic<bool> busy{false};
  int64_t tasks = 0;
  const std::function<void(int64_t, int)>* fn = nullptr;
  std::mutex mutex;
  std::condition_variable wake;
  int sleeping = 0;            // guarded by mutex

  void take_tasks(int worker) {
    for (int64_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) (*fn)(t, worker);
  }

  void work(int worker) {
    uint64_t seen = 0;
    while (true) {
      const auto until = std::chrono::steady_clock::now() + kSpin;
      while (generation.load(std::memory_order_acquire) == seen && !stop.load(std::memory_order_relaxed)) {
        for (int i = 0; i < 32; ++i) relax();
        if (std::chrono::steady_clock::now() < until) continue;
        std::unique_lock lock(mutex);
        ++sleeping;
        wake.wait(lock, [&] { return generation.load(std::memory_order_acquire) != seen || stop.load(std::memory_order_relaxed); });
        --sleeping;
      }
      if (stop.load(std::memory_order_relaxed)) return;
      seen = generation.load(std::memory_order_acquire);
      take_tasks(worker);
      running.fetch_sub(1, std::memory_order_release);
    }
  }
};

ThreadPool::ThreadPool(int threads, bool pin) : impl_(std::make_unique<Impl>()) {
  MI_CHECK(threads >= 1);
  for (int i = 1; i < threads; ++i)
    impl_->workers.emplace_back([this, i, pin] {
      if (pin) pin_to(i);
      impl_->work(i);
    });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->stop.store(true, std::memory_order_relaxed);
  }
  impl_->wake.notify_all();
  for (std::thread& t : impl_->workers) t.join();
}

int ThreadPool::threads() const { return int(impl_->workers.size()) + 1; }

void ThreadPool::run(int64_t tasks, const std::function<void(int64_t, int)>& fn) {
  if (tasks <= 0) return;
  Impl& p = *impl_;
  MI_CHECK(!p.busy.exchange(true, std::memory_order_acquire), "ThreadPool::run called twice at once or from a task");
  if (tasks == 1 || p.workers.empty()) {
    for (int64_t t = 0; t < tasks; ++t) fn(t, 0);
    p.busy.store(false, std::memory_order_release);
    return;
  }
  p.fn = &fn;
  p.tasks = tasks;
  p.next.store(0, std::memory_order_relaxed);
  p.running.store(int(p.workers.size()), std::memory_order_relaxed);
  bool anyone_asleep;
  {
    std::lock_guard lock(p.mutex);
    p.generation.fetch_add(1, std::memory_order_release);
    anyone_asleep = p.sleeping > 0;
  }
  if (anyone_asleep) p.wake.notify_all();
  p.take_tasks(0);
  // Workers that woke late find no task left, but must have looked before fn may go away.
  for (int spins = 0; p.running.load(std::memory_order_acquire) != 0; ++spins) {
    relax();
    if (spins > 20000) { std::this_thread::yield(); spins = 0; }
  }
  p.busy.store(false, std::memory_order_release);
}

}  // namespace mi::hw
