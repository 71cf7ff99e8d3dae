// OutputDir: an output appears whole or not at all.
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>

#include "base/file.h"
#include "base/util.h"

#ifndef RENAME_EXCHANGE
#define RENAME_EXCHANGE (1 << 1)
#endif

namespace mi {
namespace {

namespace fs = std::filesystem;

std::mutex g_mutex;                    // guards g_unfinished; held while a signal removes them
std::set<Path>& unfinished() {
  static std::set<Path> paths;
  return paths;
}

std::string temporary_prefix(const Path& final_path) { return "." + final_path.filename().string() + ".tmp-"; }

// ".NAME.tmp-PID-xxxx" of a process that is gone: what kill -9 left.
void remove_stale(const Path& final_path) {
  const std::string prefix = temporary_prefix(final_path);
  std::error_code ec;
  for (fs::directory_iterator it(final_path.parent_path(), ec), end; !ec && it != end; it.increment(ec)) {
    const std::string name = it->path().filename().string();
    if (name.rfind(prefix, 0) != 0) continue;
    const long pid = std::strtol(name.c_str() + prefix.size(), nullptr, 10);
    if (pid > 0 && kill(pid_t(pid), 0) != 0 && errno == ESRCH) {
      std::error_code ignored;
      fs::remove_all(it->path(), ignored);
    }
  }
}

bool is_our_output(const Path& p) {
  std::error_code ec;
  return fs::exists(p / "model.mir", ec) || fs::exists(p / "engine.json", ec) || (fs::is_directory(p, ec) && fs::is_empty(p, ec));
}

Status sync_path(const Path& p) {
  const int fd = ::open(p.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  fsync(fd);
  ::close(fd);
  return {};
}

void remove_all_unfinished() {
  std::lock_guard lock(g_mutex);
  std::error_code ignored;
  for (const Path& p : unfinished()) fs::remove_all(p, ignored);
}

}  // namespace

Result<OutputDir> OutputDir::create(const Path& final_path, bool force) {
  OutputDir d;
  std::error_code ec;
  d.final_ = fs::absolute(final_path, ec).lexically_normal();
  if (!d.final_.has_filename()) d.final_ = d.final_.parent_path();     // "out/"
  d.force_ = force;
  const Path parent = d.final_.parent_path();
  if (d.final_.filename().empty()) return bad_input("{}: is no usable output name", final_path.string());
  if (!fs::is_directory(parent, ec)) return bad_input("{}: the folder {} does not exist; create it first", final_path.string(), parent.string());
  if (fs::exists(fs::symlink_status(d.final_, ec))) {
    if (!force) return bad_input("{}: exists already; give another --output or --force to replace it", final_path.string());
    if (!is_our_output(d.final_))
      return bad_input("{}: exists and was not written by metainfer (no model.mir or engine.json in it), so --force does not replace it", final_path.string());
  }
  remove_stale(d.final_);
  static std::atomic<unsigned> counter{0};
  d.tmp_ = parent / fmt::format("{}{}-{:04x}", temporary_prefix(d.final_), getpid(), counter++);
  {
    std::lock_guard lock(g_mutex);
    if (!fs::create_directory(d.tmp_, ec)) {
      if (ec == std::errc::no_space_on_device) return fail(ErrorCode::kEnvironment, "{}: the disk is full", final_path.string());
      return fail(ErrorCode::kEnvironment, "{}: cannot write there: {}", parent.string(), ec ? ec.message() : "name taken");
    }
    unfinished().insert(d.tmp_);
  }
  return d;
}

OutputDir::OutputDir(OutputDir&& o) noexcept : tmp_(std::exchange(o.tmp_, Path())), final_(std::move(o.final_)), force_(o.force_) {}

OutputDir::~OutputDir() {
  if (tmp_.empty()) return;
  std::lock_guard lock(g_mutex);
  std::error_code ignored;
  fs::remove_all(tmp_, ignored);
  unfinished().erase(tmp_);
}

Status OutputDir::commit() {
  MI_CHECK(!tmp_.empty(), "commit() twice");
  MI_TRY_VOID(sync_path(tmp_));
  Path old;
  {
    std::lock_guard lock(g_mutex);
    std::error_code ec;
    if (fs::exists(fs::symlink_status(final_, ec))) {
      if (!force_) return bad_input("{}: appeared while this command ran; it was not replaced", final_.string());
      // Swapped in one step, so that there is always a whole output under the name.
      if (syscall(SYS_renameat2, AT_FDCWD, tmp_.c_str(), AT_FDCWD, final_.c_str(), RENAME_EXCHANGE) == 0) {
        old = tmp_;
      } else {
        // File systems without exchange: the old one steps aside first.
        old = tmp_;
        old += "-old";
        if (rename(final_.c_str(), old.c_str()) != 0) return fail(ErrorCode::kEnvironment, "{}: cannot replace it: {}", final_.string(), std::strerror(errno));
        if (rename(tmp_.c_str(), final_.c_str()) != 0) {
          const int err = errno;
          (void)!rename(old.c_str(), final_.c_str());
          return fail(ErrorCode::kEnvironment, "{}: cannot put the output in place: {}", final_.string(), std::strerror(err));
        }
      }
    } else if (rename(tmp_.c_str(), final_.c_str()) != 0) {
      return fail(ErrorCode::kEnvironment, "{}: cannot put the output in place: {}", final_.string(), std::strerror(errno));
    }
    unfinished().erase(tmp_);
    if (!old.empty()) unfinished().insert(old);
    tmp_.clear();
  }
  MI_TRY_VOID(sync_path(final_.parent_path()));
  if (!old.empty()) {
    std::error_code ignored;
    fs::remove_all(old, ignored);
    std::lock_guard lock(g_mutex);
    unfinished().erase(old);
  }
  return {};
}

void remove_outputs_on_signal() {
  // A thread waits for the signals: it may take locks and walk directories, which a handler may not.
  static std::once_flag once;
  std::call_once(once, [] {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &set, nullptr);
    std::thread([set] {
      int signal = 0;
      if (sigwait(&set, &signal) != 0) return;
      remove_all_unfinished();
      _exit(128 + signal);
    }).detach();
  });
}

}  // namespace mi
