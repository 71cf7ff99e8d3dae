#include "server/line_log.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace mi::server {
namespace {

constexpr size_t kMostQueued = size_t(8) << 20;
constexpr int kPatience = 1000;  // milliseconds that a full pipe is waited for

Result<int> open_log(const char* flag, const std::string& path) {
  const int fd = path == "-" ? ::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3)
                             : ::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0640);
  if (fd < 0) return fail(ErrorCode::kEnvironment, "{} {}: {}", flag, path, std::strerror(errno));
  return fd;
}

}  // namespace

Result<std::unique_ptr<LineLog>> LineLog::open(const char* flag, const std::string& path) {
  MI_TRY(const int fd, open_log(flag, path));
  return std::unique_ptr<LineLog>(new LineLog(flag, path, fd));
}

Status LineLog::check(const char* flag, const std::string& path) {
  MI_TRY(const int fd, open_log(flag, path));
  ::close(fd);
  return {};
}

LineLog::LineLog(const char* flag, std::string path, int fd)
    : flag_(flag), path_(std::move(path)), fd_(fd), thread_([this] { run(); }) {}

LineLog::~LineLog() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_one();
  thread_.join();
  ::close(fd_);
  if (next_fd_ >= 0) ::close(next_fd_);
}

void LineLog::write(std::string line) {
  line += '\n';
  {
    std::lock_guard lock(mutex_);
    if (queued_bytes_ + line.size() > kMostQueued) {
      ++dropped_;
      return;
    }
    queued_bytes_ += line.size();
    lines_.push_back(std::move(line));
  }
  changed_.notify_one();
}

Status LineLog::reopen() {
  if (path_ == "-") return {};
  MI_TRY(const int fd, open_log(flag_, path_));
  std::lock_guard lock(mutex_);
  if (next_fd_ >= 0) ::close(next_fd_);
  next_fd_ = fd;
  changed_.notify_one();
  return {};
}

bool LineLog::put(const std::string& line) {
  for (size_t at = 0; at < line.size();) {
    pollfd p{fd_, POLLOUT, 0};
    if (::poll(&p, 1, kPatience) <= 0 || (p.revents & POLLOUT) == 0) return false;
    const ssize_t n = ::write(fd_, line.data() + at, line.size() - at);
    if (n < 0 && errno != EINTR && errno != EAGAIN) return false;
    if (n > 0) at += size_t(n);
  }
  return true;
}

void LineLog::run() {
  bool stuck = false;
  while (true) {
    std::deque<std::string> lines;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ending_ || next_fd_ >= 0 || !lines_.empty(); });
      if (next_fd_ >= 0) {
        ::close(fd_);
        fd_ = std::exchange(next_fd_, -1);
      }
      if (lines_.empty() && ending_) return;
      lines.swap(lines_);
      queued_bytes_ = 0;
    }
    for (const std::string& line : lines) {
      {
        std::lock_guard lock(mutex_);
        if (stuck && ending_) {
          ++dropped_;
          continue;
        }
      }
      stuck = !put(line);
      if (stuck) ++dropped_;
    }
  }
}

}  // namespace mi::server
