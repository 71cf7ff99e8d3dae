#pragma once
// The access log: one JSON object a line for each answered request. Written by a thread of its own; a file that cannot
// be written, or a reader that does not read, costs lines (counted), never an answer.

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/result.h"
#include "server/http/exchange.h"

namespace mi::server {

class AccessLog {
 public:
  // "-": standard output.
  static Result<std::unique_ptr<AccessLog>> open(const std::string& path);
  // Whether the file can be opened; makes it if there is none.
  static Status check(const std::string& path);
  ~AccessLog();  // writes what is queued, for a moment at most
  void write(const AccessRecord& r);
  // Opens the path anew, for who moved the file away. The old one stays where that fails.
  Status reopen();
  uint64_t dropped() const { return dropped_; }

 private:
  AccessLog(std::string path, int fd);
  void run();
  bool put(const std::string& line);  // false: dropped
  const std::string path_;
  std::atomic<uint64_t> dropped_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::string> lines_;
  size_t queued_bytes_ = 0;
  int fd_, next_fd_ = -1;
  bool ending_ = false;
  std::thread thread_;
};

std::string access_line(const AccessRecord& r, int64_t milliseconds_since_epoch);

}  // namespace mi::server
