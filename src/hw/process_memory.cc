#include "hw/process_memory.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>
#include <vector>

namespace mi::hw {
namespace {

// Documentation/admin-guide/mm/pagemap.rst: bit 63 present, bit 61 page of a file or shared.
constexpr uint64_t kPresent = uint64_t(1) << 63, kFilePage = uint64_t(1) << 61;

std::optional<int64_t> kilobytes(std::string_view text, std::string_view key) {
  const size_t at = text.find(key);
  if (at == std::string_view::npos || (at > 0 && text[at - 1] != '\n')) return std::nullopt;
  std::istringstream in(std::string(text.substr(at + key.size(), 40)));
  int64_t n = 0;
  std::string unit;
  if (!(in >> n >> unit) || unit != "kB") return std::nullopt;
  return n * 1024;
}

}  // namespace

Result<ProcessMemory> parse_process_status(std::string_view text) {
  ProcessMemory m;
  const std::pair<std::string_view, int64_t*> wanted[] = {
      {"VmRSS:", &m.resident}, {"RssAnon:", &m.anonymous}, {"VmHWM:", &m.peak}};
  for (const auto& [key, to] : wanted) {
    const auto n = kilobytes(text, key);
    if (!n) return fail(ErrorCode::kEnvironment, "/proc/self/status has no {} on this system", key);
    *to = *n;
  }
  return m;
}

Result<ProcessMemory> process_memory() {
  std::ifstream f("/proc/self/status");
  std::ostringstream text;
  text << f.rdbuf();
  if (!f) return fail(ErrorCode::kEnvironment, "/proc/self/status cannot be read");
  return parse_process_status(text.str());
}

bool reset_peak_memory() {
  const int fd = open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC);
  if (fd < 0) return false;
  const bool ok = write(fd, "5", 1) == 1;
  close(fd);
  return ok;
}

Result<ResidentPart> resident_part(const void* data, int64_t bytes) {
  ResidentPart r;
  if (bytes <= 0) return r;
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return fail(ErrorCode::kEnvironment, "/proc/self/pagemap cannot be opened: {}", std::strerror(errno));
  const int64_t begin = int64_t(reinterpret_cast<uintptr_t>(data)), end = begin + bytes;
  std::vector<uint64_t> entries(1 << 16);
  for (int64_t at = begin / page; at < (end + page - 1) / page;) {
    const int64_t want = std::min<int64_t>(int64_t(entries.size()), (end + page - 1) / page - at);
    const ssize_t got = pread(fd, entries.data(), size_t(want) * 8, at * 8);
    if (got < 8) {
      const int error = errno;
      close(fd);
      return fail(ErrorCode::kEnvironment, "/proc/self/pagemap cannot be read: {}",
                  got < 0 ? std::strerror(error) : "it ends early");
    }
    for (int64_t i = 0; i < got / 8; ++i, ++at) {
      if (!(entries[size_t(i)] & kPresent)) continue;
      const int64_t part = std::min(end, (at + 1) * page) - std::max(begin, at * page);
      (entries[size_t(i)] & kFilePage ? r.file : r.anonymous) += part;
    }
  }
  close(fd);
  return r;
}

}  // namespace mi::hw
