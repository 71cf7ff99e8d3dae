#pragma once
// How long a request that comes now would wait for its first step: its place in the queue times what the queue took per
// place lately. Counts only while others wait, since only then is the pace that of the server and not of who asks. Pure
// arithmetic on times it is told.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>

namespace mi::runtime {

class QueueRate {
 public:
  // batch: sequences that run at once.
  explicit QueueRate(int64_t batch = 1)
      : batch_(double(batch)),
        memory_(double(std::max<int64_t>(4 * batch, 32))),
        least_(double(std::clamp<int64_t>(batch, 1, 8))) {}

  // A step begins: `started` sequences left the queue for it, `left` wait on.
  void step(int64_t started, int64_t left, double now) {
    const double seconds = std::max(now - last_, 0.0);
    last_ = now;
    if (queued_) {
      seconds_ += seconds;
      starts_ += double(started);
      if (started > 0) seconds_to_last_ = seconds_;
      if (starts_ > memory_) scale(memory_ / starts_);
    } else {
      scale(std::exp(-seconds / kForget));  // what is asked now may be of another kind
    }
    queued_ = left > 0;
  }

  // Mean time between two starts while others wait; 0: not known. Answers of equal length end together, so the time
  // since the last start may belong to a whole batch of them; only beyond that does it mean that the queue stands.
  double seconds_per_start() const {
    return starts_ >= least_ ? std::max(seconds_to_last_ / starts_, seconds_ / (starts_ + batch_)) : 0;
  }

 private:
  static constexpr double kForget = 60;  // seconds without a queue
  void scale(double by) {
    starts_ *= by;
    seconds_ *= by;
    seconds_to_last_ *= by;
  }
  double batch_, memory_, least_;    // starts
  double starts_ = 0, seconds_ = 0;  // while others waited, older ones counting less
  double seconds_to_last_ = 0;       // seconds_ when the last one started
  double last_ = 0;
  bool queued_ = false;
};

// Starts until that of a request which comes now, its own included; 0 if a place is free for it. queue: how many wait,
// by priority, of which smaller numbers and earlier ones go first.
inline int64_t starts_until(const std::map<int64_t, int64_t>& queue, int64_t priority, int64_t free_places) {
  int64_t before = 0;
  for (const auto& [p, n] : queue)
    if (p <= priority) before += n;
  return std::max<int64_t>(before + 1 - free_places, 0);
}

}  // namespace mi::runtime
