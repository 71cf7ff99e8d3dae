#include "server/supervisor.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "base/file.h"
#include "server/say.h"

namespace mi::server {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kListenerFd = 3, kPipeFd = 4;  // in the worker
constexpr double kLongestPause = 10;         // before another start

double since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

Result<std::vector<std::string>> own_arguments() {
  const int fd = ::open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return fail(ErrorCode::kEnvironment, "--watchdog: /proc/self/cmdline cannot be read");
  std::string all;
  char buffer[4096];
  for (ssize_t n; (n = ::read(fd, buffer, sizeof(buffer))) > 0;) all.append(buffer, size_t(n));
  ::close(fd);
  std::vector<std::string> arguments;
  for (size_t at = 0; at < all.size();) {
    const size_t end = std::min(all.find('\0', at), all.size());
    arguments.push_back(all.substr(at, end - at));
    at = end + 1;
  }
  return arguments;
}

struct Worker {
  pid_t pid = -1;
  int pipe = -1;
  bool served = false;  // gave a sign of life
  Clock::time_point started, heard;
};

class Supervisor {
 public:
  Supervisor(int listener, double silence, bool reloads, std::vector<std::string> arguments)
      : listener_(listener), silence_(silence), reloads_(reloads), arguments_(std::move(arguments)) {}

  Result<int> run() {
    sigset_t set, before;
    sigemptyset(&set);
    for (int s : {SIGTERM, SIGINT, SIGHUP, SIGCHLD}) sigaddset(&set, s);
    sigprocmask(SIG_BLOCK, &set, &before);
    mask_ = before;
    signals_ = ::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (signals_ < 0) return fail(ErrorCode::kEnvironment, "--watchdog: {}", std::strerror(errno));
    MI_TRY_VOID(start());
    while (true) {
      pollfd p[2] = {{signals_, POLLIN, 0}, {worker_.pipe, POLLIN, 0}};
      ::poll(p, 2, wait_milliseconds());
      hear();
      if (const auto code = take_signals()) return *code;
      if (worker_.pid < 0) {
        if (Clock::now() < next_start_) continue;
        if (const Status s = start(); !s.ok()) {
          say("watchdog    {}; tried again in {:.0f} s\n", s.error().message(), kLongestPause);
          next_start_ = Clock::now() + std::chrono::seconds(int(kLongestPause));
        }
      } else if (worker_.served && since(worker_.heard) > silence_) {
        say("watchdog    worker {} gave no sign of life for {:.0f} s and is killed\n", worker_.pid, silence_);
        ::kill(worker_.pid, SIGKILL);
        worker_.heard = Clock::now();
      }
    }
  }

 private:
  int wait_milliseconds() const {
    double s = 3600;
    if (worker_.pid < 0)
      s = -since(next_start_);
    else if (worker_.served)
      s = silence_ - since(worker_.heard) + 0.01;
    return int(std::clamp(s, 0.0, 3600.0) * 1000) + 1;
  }

  Status start() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) return fail(ErrorCode::kEnvironment, "--watchdog: {}", std::strerror(errno));
    const pid_t parent = ::getpid();
    const pid_t pid = ::fork();
    if (pid < 0) {
      const int error = errno;
      ::close(ends[0]);
      ::close(ends[1]);
      return fail(ErrorCode::kEnvironment, "--watchdog: no worker could be started: {}", std::strerror(error));
    }
    if (pid == 0) become_worker(parent, ends[1]);
    ::close(ends[1]);
    ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
    worker_ = {pid, ends[0], false, Clock::now(), Clock::now()};
    say("watchdog    worker {}\n", pid);
    return {};
  }

  [[noreturn]] void become_worker(pid_t parent, int pipe) {
    // A worker does not outlive its parent by more than its answers, and Ctrl-C comes to it once, through the parent.
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) _exit(1);
    ::setpgid(0, 0);
    // Beyond the two numbers first: either descriptor may have the other's.
    const int listener = ::fcntl(listener_, F_DUPFD, 10), out = ::fcntl(pipe, F_DUPFD, 10);
    ::dup2(listener, kListenerFd);
    ::dup2(out, kPipeFd);
    ::close(listener);
    ::close(out);
    ::setenv("LISTEN_FDS", "1", 1);
    ::setenv("LISTEN_PID", std::to_string(::getpid()).c_str(), 1);
    ::setenv(kHeartbeatVariable, std::to_string(kPipeFd).c_str(), 1);
    ::setenv(kRestartsVariable, std::to_string(restarts_).c_str(), 1);
    std::vector<char*> argv;
    for (std::string& a : arguments_) argv.push_back(a.data());
    argv.push_back(nullptr);
    sigprocmask(SIG_SETMASK, &mask_, nullptr);
    ::execv("/proc/self/exe", argv.data());
    _exit(127);
  }

  void hear() {
    char buffer[256];
    bool heard = false;
    while (worker_.pipe >= 0 && ::read(worker_.pipe, buffer, sizeof(buffer)) > 0) heard = true;
    if (!heard) return;
    worker_.heard = Clock::now();
    worker_.served = ever_served_ = true;
  }

  std::optional<int> take_signals() {
    signalfd_siginfo info;
    while (::read(signals_, &info, sizeof(info)) == sizeof(info)) {
      const int signal = int(info.ssi_signo);
      if (signal == SIGCHLD) continue;
      if (signal != SIGHUP || !reloads_) {
        ending_ = true;
        if (listener_ >= 0) ::close(listener_);  // new clients are refused, not left waiting
        listener_ = -1;
      }
      if (worker_.pid > 0) ::kill(worker_.pid, signal);
    }
    int status = 0;
    // As the first process of a container this one gets orphans too.
    for (pid_t pid; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;)
      if (pid == worker_.pid)
        if (const auto code = worker_ended(status)) return code;
    if (ending_ && worker_.pid < 0) return 0;
    return std::nullopt;
  }

  std::optional<int> worker_ended(int status) {
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    const std::string how = WIFEXITED(status) ? fmt::format("ended with exit code {}", code)
                                              : fmt::format("was ended by signal {}", WTERMSIG(status));
    hear();
    ::close(worker_.pipe);
    const double lived = since(worker_.started);
    const pid_t pid = worker_.pid;
    worker_.pid = worker_.pipe = -1;
    if (ending_ || !ever_served_) return code;
    // At once after a long life; after ever longer pauses when workers die young.
    pause_ = lived > 60 ? 0 : std::min(kLongestPause, std::max(0.1, pause_ * 2));
    next_start_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(pause_));
    ++restarts_;
    say("watchdog    worker {} {} after {:.1f} s; the next one starts in {:.1f} s\n", pid, how, lived, pause_);
    return std::nullopt;
  }

  int listener_;
  const double silence_;
  const bool reloads_;
  std::vector<std::string> arguments_;
  sigset_t mask_{};
  int signals_ = -1, restarts_ = 0;
  double pause_ = 0;
  bool ending_ = false, ever_served_ = false;
  Worker worker_;
  Clock::time_point next_start_;
};

}  // namespace

bool is_supervised() { return std::getenv(kHeartbeatVariable) != nullptr; }

Result<int> supervise(int listener, double silence_seconds, bool reloads) {
  MI_TRY(auto arguments, own_arguments());
  return Supervisor(listener, silence_seconds, reloads, std::move(arguments)).run();
}

}  // namespace mi::server
