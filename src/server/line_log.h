#pragma once
// A file of lines. Written by a thread of its own; a file that cannot be written, or a reader that does not read, costs
// lines (counted), never an answer.

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/result.h"

namespace mi::server {

class LineLog {
 public:
  // flag: whose value the path is, for errors. "-": standard output.
  static Result<std::unique_ptr<LineLog>> open(const char* flag, const std::string& path);
  // Whether the file can be opened; makes it if there is none.
  static Status check(const char* flag, const std::string& path);
  ~LineLog();  // writes what is queued, for a moment at most
  void write(std::string line);  // which gets its newline here
  // Opens the path anew, for who moved the file away. The old one stays where that fails.
  Status reopen();
  uint64_t dropped() const { return dropped_; }

 private:
  LineLog(const char* flag, std::string path, int fd);
  void run();
  bool put(const std::string& line);  // false: dropped
  const char* const flag_;
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

}  // namespace mi::server
