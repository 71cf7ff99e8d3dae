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

void keep_on(const std::vector<int>& cpus) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (int cpu : cpus)
    if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &mask);
  sched_setaffinity(0, sizeof mask, &mask);  // refused: it runs anywhere
}

}  // namespace

struct ThreadPool::Impl {
  // One word says which job there is and who is in it: [number of the job | open | workers inside]. A worker enters an
  // open job by counting itself in, takes tasks by counting `next` up, and counts itself out. The caller closes the job
  // when no task is left and waits for the workers inside, so that fn outlives every use; a worker that is still asleep or
  // not scheduled is not waited for, it finds the job closed.
  static constexpr uint64_t kOpen = uint64_t(1) << 16, kInside = kOpen - 1, kJob = kOpen << 1;
  std::atomic<uint64_t> state{0};
  std::atomic<int64_t> next{0};
  std::atomic<bool> stop{false};
  std::atomic<bool> busy{false};
  int64_t tasks = 0;
  const std::function<void(int64_t, int)>* fn = nullptr;
  std::vector<std::thread> workers;
  std::mutex mutex;
  std::condition_variable wake;
  int sleeping = 0;            // guarded by mutex

  void take_tasks(int worker) {
    for (int64_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) (*fn)(t, worker);
  }

  // A job that is open and not the one this worker was in last.
  static bool is_new(uint64_t s, uint64_t last_job) { return (s & kOpen) && s / kJob != last_job; }

  // False when the job closed meanwhile.
  bool enter(uint64_t* last_job) {
    uint64_t s = state.load(std::memory_order_acquire);
    while (is_new(s, *last_job))
      if (state.compare_exchange_weak(s, s + 1, std::memory_order_acquire)) {
        *last_job = s / kJob;
        return true;
      }
    return false;
  }

  void wait_for_work(uint64_t last_job) {
    const auto ready = [&] { return is_new(state.load(std::memory_order_relaxed), last_job) || stop.load(std::memory_order_relaxed); };
    const auto until = std::chrono::steady_clock::now() + kSpin;
    while (std::chrono::steady_clock::now() < until)
      for (int i = 0; i < 32; ++i) {
        if (ready()) return;
        relax();
      }
    std::unique_lock lock(mutex);
    ++sleeping;
    wake.wait(lock, ready);
    --sleeping;
  }

  void work(int worker) {
    for (uint64_t last_job = 0;;) {
      wait_for_work(last_job);
      if (stop.load(std::memory_order_relaxed)) return;
      if (!enter(&last_job)) continue;
      take_tasks(worker);
      state.fetch_sub(1, std::memory_order_release);
    }
  }
};

ThreadPool::ThreadPool(int threads, std::vector<std::vector<int>> cpus) : impl_(std::make_unique<Impl>()) {
  MI_CHECK(threads >= 1 && threads < 4096, "{}", threads);
  for (int i = 1; i < threads; ++i)
    impl_->workers.emplace_back([this, i, mine = size_t(i) < cpus.size() ? cpus[size_t(i)] : std::vector<int>()] {
      if (!mine.empty()) keep_on(mine);
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
int64_t ThreadPool::jobs() const { return int64_t(impl_->state.load(std::memory_order_relaxed) / Impl::kJob); }

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
  int sleepers = 0;
  {
    std::lock_guard lock(p.mutex);
    const uint64_t job = p.state.load(std::memory_order_relaxed) / Impl::kJob + 1;
    p.state.store(job * Impl::kJob + Impl::kOpen, std::memory_order_release);
    sleepers = p.sleeping;
  }
  if (tasks - 1 >= sleepers) {
    if (sleepers > 0) p.wake.notify_all();
  } else {
    for (int64_t i = 1; i < tasks; ++i) p.wake.notify_one();
  }
  p.take_tasks(0);
  uint64_t s = p.state.fetch_and(~Impl::kOpen, std::memory_order_acquire);
  for (int spins = 0; (s & Impl::kInside) != 0; s = p.state.load(std::memory_order_acquire)) {
    relax();
    if (++spins % 1024 == 0) std::this_thread::yield();
  }
  p.busy.store(false, std::memory_order_release);
}

}  // namespace mi::hw
