#pragma once
// A fixed pool of worker threads for the kernels of a step. The caller is worker 0. Workers spin briefly for the next
// job, then sleep, so that an idle server uses no CPU.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace mi::hw {

class ThreadPool {
 public:
  // threads includes the caller. cpus: where each worker may run (NumaPlan::worker_cpus); empty: anywhere. The caller,
  // worker 0, stays as it is.
  explicit ThreadPool(int threads, std::vector<std::vector<int>> cpus = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;

  int threads() const;
  // How often run() has called the workers so far: what fork and join cost is paid this often.
  int64_t jobs() const;

  // Calls fn(task, worker) for every task in [0, tasks), each exactly once, handed out dynamically; worker in
  // [0, threads()). Returns when all are done. Only one caller at a time; fn must not call back into the pool.
  void run(int64_t tasks, const std::function<void(int64_t task, int worker)>& fn);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// min(affinity mask, cgroup v1/v2 CPU quota of this and all parent groups, rounded down, at least 1), and why.
struct ThreadAdvice { int threads; std::string reason; };
ThreadAdvice advise_threads();

}  // namespace mi::hw
