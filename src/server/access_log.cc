#include "server/access_log.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>

#include "base/json.h"
#include "base/utf8.h"

namespace mi::server {
namespace {

constexpr size_t kMostQueued = size_t(8) << 20;
constexpr size_t kLongestPath = 1000, kLongestAgent = 200;  // a line then fits into one write to a pipe
constexpr int kPatience = 1000;                             // milliseconds that a full pipe is waited for

Result<int> open_log(const std::string& path) {
  const int fd = path == "-" ? ::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3)
                             : ::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0640);
  if (fd < 0) return fail(ErrorCode::kEnvironment, "--access-log {}: {}", path, std::strerror(errno));
  return fd;
}

std::string time_text(int64_t ms) {
  const time_t s = time_t(ms / 1000);
  tm t{};
  gmtime_r(&s, &t);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", t.tm_year + 1900, t.tm_mon + 1, t.tm_mday, t.tm_hour,
                     t.tm_min, t.tm_sec, ms % 1000);
}

double thousandths(double seconds) { return double(int64_t(seconds * 1e6 + 0.5)) / 1e3; }

}  // namespace

std::string access_line(const AccessRecord& r, int64_t ms) {
  const HttpRequest& q = r.request;
  Json j{{"time", time_text(ms)},
         {"request_id", q.id},
         {"client", q.peer},
         {"method", q.method},
         {"path", q.path.substr(0, kLongestPath)},
         {"status", r.status},
         {"end", r.end},
         {"bytes_in", r.bytes_in},
         {"bytes_out", r.bytes_out},
         {"first_byte_ms", thousandths(r.first_byte_seconds)},
         {"duration_ms", thousandths(r.seconds)}};
  if (r.error_status != 0) j["error_status"] = r.error_status;
  if (q.tls) j["tls"] = true;
  if (!q.agent.empty()) j["user_agent"] = q.agent.substr(0, kLongestAgent);
  if (!q.trace_id.empty()) {
    j["trace_id"] = q.trace_id;
    j["parent_span_id"] = q.parent_id;
    j["span_id"] = q.span_id;
  }
  for (const auto& [name, value] : r.notes) j[name] = value;
  return dump_json(j);
}

Result<std::unique_ptr<AccessLog>> AccessLog::open(const std::string& path) {
  MI_TRY(const int fd, open_log(path));
  return std::unique_ptr<AccessLog>(new AccessLog(path, fd));
}

Status AccessLog::check(const std::string& path) {
  MI_TRY(const int fd, open_log(path));
  ::close(fd);
  return {};
}

AccessLog::AccessLog(std::string path, int fd) : path_(std::move(path)), fd_(fd), thread_([this] { run(); }) {}

AccessLog::~AccessLog() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_one();
  thread_.join();
  ::close(fd_);
  if (next_fd_ >= 0) ::close(next_fd_);
}

void AccessLog::write(const AccessRecord& r) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  std::string line = access_line(r, std::chrono::duration_cast<std::chrono::milliseconds>(now).count()) + "\n";
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

Status AccessLog::reopen() {
  if (path_ == "-") return {};
  MI_TRY(const int fd, open_log(path_));
  std::lock_guard lock(mutex_);
  if (next_fd_ >= 0) ::close(next_fd_);
  next_fd_ = fd;
  changed_.notify_one();
  return {};
}

bool AccessLog::put(const std::string& line) {
  for (size_t at = 0; at < line.size();) {
    pollfd p{fd_, POLLOUT, 0};
    if (::poll(&p, 1, kPatience) <= 0 || (p.revents & POLLOUT) == 0) return false;
    const ssize_t n = ::write(fd_, line.data() + at, line.size() - at);
    if (n < 0 && errno != EINTR && errno != EAGAIN) return false;
    if (n > 0) at += size_t(n);
  }
  return true;
}

void AccessLog::run() {
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
