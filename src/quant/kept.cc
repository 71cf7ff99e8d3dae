#include "quant/kept.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "base/place.h"

namespace mi::quant {
namespace fs = std::filesystem;

Result<KeptFiles> KeptFiles::open(const Path& output, const std::string& key) {
  KeptFiles k;
  std::error_code ec;
  const Path final = beside(fs::absolute(output, ec).lexically_normal(), "");
  const Path dir = final.parent_path() / ("." + final.filename().string() + ".kept");
  fs::create_directory(dir, ec);
  const int lock = ::open(dir.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (lock < 0) return k;
  if (flock(lock, LOCK_EX | LOCK_NB) != 0) {
    const bool taken = errno == EWOULDBLOCK;
    ::close(lock);
    if (taken) return fail(ErrorCode::kEnvironment, "{}: another run is making this output now; wait for it, or choose another --output", output.string());
    return k;
  }
  k.lock_ = lock;
  const auto found = read_file(dir / "key", size_t(16) << 20);
  if (!found.ok() || *found != key) {
    for (const auto& e : fs::directory_iterator(dir, ec)) {
      std::error_code ignored;
      fs::remove_all(e.path(), ignored);
    }
    if (!write_file(dir / "key", key).ok()) return k;
  }
  k.path_ = dir;
  say_on_signal(fmt::format("{}: the same command goes on from here; delete this folder to start anew", dir.string()));
  return k;
}

KeptFiles::KeptFiles(KeptFiles&& o) noexcept : path_(std::exchange(o.path_, {})), lock_(std::exchange(o.lock_, -1)) {}
KeptFiles& KeptFiles::operator=(KeptFiles&& o) noexcept {
  std::swap(path_, o.path_);
  std::swap(lock_, o.lock_);
  return *this;
}
KeptFiles::~KeptFiles() {
  if (!path_.empty()) say_on_signal("");
  if (lock_ >= 0) ::close(lock_);
}

void KeptFiles::remove() {
  std::error_code ignored;
  if (!path_.empty()) {
    fs::remove_all(path_, ignored);
    say_on_signal("");
  }
  path_.clear();
}

}  // namespace mi::quant
