// OutputDir and OutputFile: an output appears whole or not at all.
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "base/file.h"
#include "base/place.h"
#include "base/util.h"

#ifndef RENAME_EXCHANGE
#define RENAME_EXCHANGE (1 << 1)
#endif
#ifndef RENAME_NOREPLACE
#define RENAME_NOREPLACE (1 << 0)
#endif

namespace mi {
namespace {

namespace fs = std::filesystem;

std::mutex g_mutex;                    // guards unfinished(); held while a signal removes them
std::set<Path>& unfinished() {
  static auto* paths = new std::set<Path>;     // never destroyed: the signal thread outlives main()
  return *paths;
}
std::string& signal_note() {
  static auto* note = new std::string;
  return *note;
}
void forget(const Path& p) {
  std::lock_guard lock(g_mutex);
  unfinished().erase(p);
}
// The registry keeps the path until it is gone, so that a signal meanwhile finishes the removal.
void remove_now(const Path& p) {
  std::error_code ignored;
  fs::remove_all(p, ignored);
  forget(p);
}

Error os_error(const Path& p, const char* what, int err) {
  if (err == ENOSPC || err == EDQUOT) return disk_full(p);
  if (err == EFBIG) return too_large(p);
  return fail(ErrorCode::kEnvironment, "{}: {}: {}", p.string(), what, std::strerror(err));
}

std::string temporary_prefix(const Path& final_path) { return fmt::format(".{}.tmp-", final_path.filename().string()); }

// What kill -9 left of earlier runs with this output name. A temporary is alive while its maker holds a lock on it. A
// process number alone would not do: in containers every run may have the same one, and two containers that share a
// folder do not see each other's. (A file system without locks keeps leftovers.)
void remove_stale(const Path& final_path) {
  const std::string prefix = temporary_prefix(final_path);
  std::error_code ec;
  for (fs::directory_iterator it(final_path.parent_path(), ec), end; !ec && it != end; it.increment(ec)) {
    if (it->path().filename().string().rfind(prefix, 0) != 0) continue;
    const int fd = ::open(it->path().c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
    if (fd < 0) continue;
    std::error_code ignored;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) fs::remove_all(it->path(), ignored);     // locked meanwhile: see make_place
    ::close(fd);
  }
}

struct Place { Path final, tmp; int lock = -1; };

// Everything that OutputDir and OutputFile have in common before the first byte: absolute name, parent, refusal of what
// exists, leftovers, and the locked temporary. irreplaceable() says why an existing output may not be replaced, or "".
Result<Place> make_place(const Path& final_path, bool force, bool directory, std::string (*irreplaceable)(const Path&)) {
  Place place;
  std::error_code ec;
  place.final = fs::absolute(final_path, ec).lexically_normal();
  if (directory && !place.final.has_filename()) place.final = place.final.parent_path();     // "out/"
  if (final_path.empty() || place.final.filename().empty()) return bad_input("'{}' is no usable output name", final_path.string());
  const Path parent = place.final.parent_path();
  if (!fs::is_directory(parent, ec)) return bad_input("{}: the folder {} does not exist; create it first", final_path.string(), parent.string());
  if (fs::exists(fs::symlink_status(place.final, ec))) {
    if (!force) return bad_input("{}: exists already; give another name, or --force to replace it", final_path.string());
    if (const std::string why = irreplaceable(place.final); !why.empty()) return bad_input("{}: {}, so --force does not replace it", final_path.string(), why);
  }
  remove_stale(place.final);
  std::lock_guard lock(g_mutex);
  for (unsigned n = 0; n < 10000; ++n) {
    place.tmp = parent / fmt::format("{}{}-{}", temporary_prefix(place.final), getpid(), n);
    const int made = directory ? mkdir(place.tmp.c_str(), 0755) : ::open(place.tmp.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (made < 0 && errno == EEXIST) continue;
    if (made < 0) return os_error(parent, "cannot write there", errno);
    if (!directory) ::close(made);
    unfinished().insert(place.tmp);
    place.lock = ::open(place.tmp.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat st {};
    if (place.lock >= 0 && (flock(place.lock, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) && fstat(place.lock, &st) == 0 && st.st_nlink > 0)
      return place;
    // Another run with this output name took it for a leftover, between its creation and the lock.
    if (place.lock >= 0) ::close(std::exchange(place.lock, -1));
    unfinished().erase(place.tmp);
  }
  return fail(ErrorCode::kEnvironment, "{}: cannot make a temporary beside it", place.final.string());
}

Status sync_one(const Path& p) {
  const int fd = ::open(p.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
  if (fd < 0) return {};     // a link, or not readable for us: nothing of ours
  const int rc = fsync(fd), err = errno;
  ::close(fd);
  // Other errors say that this file system has no fsync for such a file.
  if (rc != 0 && (err == EIO || err == ENOSPC || err == EDQUOT)) return os_error(p, "cannot write", err);
  return {};
}
Status sync_tree(const Path& dir) {
  std::error_code ec;
  for (fs::recursive_directory_iterator it(dir, ec), end; !ec && it != end; it.increment(ec)) MI_TRY_VOID(sync_one(it->path()));
  return sync_one(dir);
}

// Renames tmp to final. *old: where the replaced output went, to be removed; it is among the unfinished outputs.
Status put_in_place(const Path& tmp, const Path& final_path, bool force, Path* old) {
  std::lock_guard lock(g_mutex);
  const auto rename2 = [&](unsigned flags) { return int(syscall(SYS_renameat2, AT_FDCWD, tmp.c_str(), AT_FDCWD, final_path.c_str(), flags)); };
  const auto has_no_flags = [] { return errno == EINVAL || errno == ENOSYS || errno == ENOTSUP; };
  std::error_code ec;
  int rc = rename2(RENAME_NOREPLACE);
  if (rc != 0 && has_no_flags() && !fs::exists(fs::symlink_status(final_path, ec))) rc = rename(tmp.c_str(), final_path.c_str());
  if (rc != 0 && fs::exists(fs::symlink_status(final_path, ec))) {
    if (!force) return bad_input("{}: appeared while this command ran; it was not replaced", final_path.string());
    // Swapped in one step, so that there is always a whole output under the name.
    rc = rename2(RENAME_EXCHANGE);
    if (rc == 0) {
      *old = tmp;
    } else if (has_no_flags()) {
      // File systems without exchange: the old one steps aside first.
      *old = tmp;
      *old += "-old";
      rc = rename(final_path.c_str(), old->c_str());
      if (rc == 0 && (rc = rename(tmp.c_str(), final_path.c_str())) != 0) {
        const int err = errno;
        (void)!rename(old->c_str(), final_path.c_str());
        errno = err;
      }
    }
  }
  if (rc != 0) {
    old->clear();
    return os_error(final_path, "cannot put the output in place", errno);
  }
  unfinished().erase(tmp);
  if (!old->empty()) unfinished().insert(*old);
  return {};
}

Status finish(const Path& tmp, const Path& final_path, bool force) {
  Path old;
  MI_TRY_VOID(put_in_place(tmp, final_path, force, &old));
  Status synced = sync_one(final_path.parent_path());
  if (!old.empty()) remove_now(old);
  return synced;
}

std::string foreign_dir(const Path& p) {
  std::error_code ec;
  for (const char* marker : {"model.mir", "engine.json", "metainfer.json"})
    if (fs::exists(p / marker, ec)) return {};
  if (fs::is_directory(p, ec) && fs::is_empty(p, ec)) return {};
  return "exists and was not written by metainfer (no model.mir, engine.json or metainfer.json in it)";
}
std::string no_file(const Path& p) {
  std::error_code ec;
  return fs::is_regular_file(fs::symlink_status(p, ec)) ? "" : "is not a regular file";
}

}  // namespace

Result<OutputDir> OutputDir::create(const Path& final_path, bool force) {
  MI_TRY(Place place, make_place(final_path, force, true, foreign_dir));
  OutputDir d;
  d.tmp_ = std::move(place.tmp);
  d.final_ = std::move(place.final);
  d.lock_ = place.lock;
  d.force_ = force;
  return d;
}
OutputDir::OutputDir(OutputDir&& o) noexcept
    : tmp_(std::exchange(o.tmp_, Path())), final_(std::move(o.final_)), force_(o.force_), lock_(std::exchange(o.lock_, -1)) {}
OutputDir::~OutputDir() {
  if (!tmp_.empty()) remove_now(tmp_);
  if (lock_ >= 0) ::close(lock_);
}
Status OutputDir::commit(Keep keep) {
  MI_CHECK(!tmp_.empty(), "commit() twice");
  if (keep == Keep::kSafe) MI_TRY_VOID(sync_tree(tmp_));
  MI_TRY_VOID(finish(tmp_, final_, force_));
  tmp_.clear();
  return {};
}

Result<OutputFile> OutputFile::create(const Path& final_path, bool force) {
  MI_TRY(Place place, make_place(final_path, force, false, no_file));
  auto w = FileWriter::create(place.tmp);
  if (!w.ok()) {
    remove_now(place.tmp);
    ::close(place.lock);
    return w.error();
  }
  OutputFile f(std::move(w).value());
  f.tmp_ = std::move(place.tmp);
  f.final_ = std::move(place.final);
  f.lock_ = place.lock;
  f.force_ = force;
  return f;
}
OutputFile::OutputFile(OutputFile&& o) noexcept
    : writer_(std::move(o.writer_)), tmp_(std::exchange(o.tmp_, Path())), final_(std::move(o.final_)), force_(o.force_), lock_(std::exchange(o.lock_, -1)) {}
OutputFile::~OutputFile() {
  if (!tmp_.empty()) remove_now(tmp_);
  if (lock_ >= 0) ::close(lock_);
}
Status OutputFile::commit() {
  MI_CHECK(!tmp_.empty(), "commit() twice");
  MI_TRY_VOID(writer_.finish());
  MI_TRY_VOID(finish(tmp_, final_, force_));
  tmp_.clear();
  return {};
}

void say_on_signal(std::string note) {
  std::lock_guard lock(g_mutex);
  signal_note() = std::move(note);
}

void remove_outputs_on_signal() {
  // A thread waits for the signals: it may take locks and walk directories, which a handler may not.
  static std::once_flag once;
  std::call_once(once, [] {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    struct sigaction hangup {};
    if (sigaction(SIGHUP, nullptr, &hangup) == 0 && hangup.sa_handler != SIG_IGN) sigaddset(&set, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &set, nullptr);
    std::thread([set] {
      int signal = 0;
      if (sigwait(&set, &signal) != 0) return;
      // Held until the end: whoever fails now because its files are gone cannot get past its destructor and end the
      // process with another status.
      g_mutex.lock();
      std::error_code ec;
      // More than once: another thread may be creating files meanwhile.
      for (int round = 0; round < 100; ++round) {
        bool gone = true;
        for (const Path& p : unfinished()) {
          fs::remove_all(p, ec);
          gone = gone && !fs::exists(fs::symlink_status(p, ec));
        }
        if (gone) break;
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      if (!signal_note().empty()) {
        const std::string line = signal_note() + "\n";
        (void)!::write(STDERR_FILENO, line.data(), line.size());
      }
      _exit(128 + signal);
    }).detach();
  });
}

}  // namespace mi
