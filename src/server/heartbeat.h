#pragma once
// Signs of life for whoever started this process: a watchdog over a pipe (supervisor.h), systemd over $NOTIFY_SOCKET
// (sd_notify(3): READY, WATCHDOG, STOPPING).

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace mi::server {

class Heartbeat {
 public:
  // Where to send them comes from the environment; the variables are taken out of it.
  Heartbeat();
  ~Heartbeat();
  // READY, and from now on a sign every `seconds` as long as `alive` says so. alive may block: then there is none.
  void begin(double seconds, std::function<bool()> alive);
  void stopping();
  bool wanted() const { return pipe_ >= 0 || !socket_path_.empty(); }
  int restarts() const { return restarts_; }  // of the process before this one

 private:
  void notify(const char* message);
  void beat();
  int pipe_ = -1, restarts_ = 0;
  std::string socket_path_;
  double systemd_seconds_ = 0;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace mi::server
