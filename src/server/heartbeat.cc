#include "server/heartbeat.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "server/supervisor.h"

namespace mi::server {
namespace {

std::string take_variable(const char* name) {
  const char* v = std::getenv(name);
  std::string s = v ? v : "";
  ::unsetenv(name);
  return s;
}

}  // namespace

Heartbeat::Heartbeat() {
  if (const std::string fd = take_variable(kHeartbeatVariable); !fd.empty()) {
    pipe_ = std::atoi(fd.c_str());
    // Nothing here may wait for the other end.
    ::fcntl(pipe_, F_SETFL, O_NONBLOCK);
    ::fcntl(pipe_, F_SETFD, FD_CLOEXEC);
  }
  restarts_ = std::atoi(take_variable(kRestartsVariable).c_str());
  socket_path_ = take_variable("NOTIFY_SOCKET");
  systemd_seconds_ = double(std::atoll(take_variable("WATCHDOG_USEC").c_str())) / 1e6;
}

Heartbeat::~Heartbeat() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  ended_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Heartbeat::notify(const char* message) {
  sockaddr_un to{};
  if (socket_path_.empty() || socket_path_.size() >= sizeof(to.sun_path)) return;
  to.sun_family = AF_UNIX;
  std::memcpy(to.sun_path, socket_path_.data(), socket_path_.size());
  if (to.sun_path[0] == '@') to.sun_path[0] = '\0';  // the abstract name space
  const int fd = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return;
  ::sendto(fd, message, std::strlen(message), MSG_DONTWAIT | MSG_NOSIGNAL, reinterpret_cast<const sockaddr*>(&to),
           socklen_t(offsetof(sockaddr_un, sun_path) + socket_path_.size()));
  ::close(fd);
}

void Heartbeat::beat() {
  if (pipe_ >= 0 && ::write(pipe_, ".", 1) < 0) {
  }  // a full pipe holds enough signs of life
  notify("WATCHDOG=1");
}

void Heartbeat::begin(double seconds, std::function<bool()> alive) {
  if (!wanted()) return;
  notify("READY=1");
  beat();
  if (systemd_seconds_ > 0) seconds = std::min(seconds, systemd_seconds_ / 3);
  thread_ = std::thread([this, seconds, alive = std::move(alive)] {
    std::unique_lock lock(mutex_);
    while (!ended_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return ending_; })) {
      lock.unlock();
      if (alive()) beat();
      lock.lock();
    }
  });
}

void Heartbeat::stopping() { notify("STOPPING=1"); }

}  // namespace mi::server
