#include "hw/memory.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <optional>
#include <set>
#include <sstream>
#include <string>

#include "hw/cgroup.h"

namespace mi::hw {
namespace {

namespace fs = std::filesystem;

std::string first_line(const fs::path& p) {
  std::ifstream f(p);
  std::string line;
  std::getline(f, line);
  return line;
}

// "32768K", "16M"; 0 when it is not a size.
int64_t parse_size(const std::string& s) {
  std::istringstream in(s);
  int64_t n = 0;
  char unit = 0;
  if (!(in >> n) || n <= 0) return 0;
  in >> unit;
  return n << (unit == 'K' ? 10 : unit == 'M' ? 20 : unit == 'G' ? 30 : 0);
}

std::optional<int64_t> number(const fs::path& p) {
  const std::string line = first_line(p);
  if (line.empty() || line.find_first_not_of("0123456789") != std::string::npos) return std::nullopt;  // "max"
  return std::min<uint64_t>(std::strtoull(line.c_str(), nullptr, 10), std::numeric_limits<int64_t>::max());
}

// The number behind "key" in a file of "key value" lines; none where it is no number ("unlimited").
std::optional<int64_t> field(const fs::path& p, const std::string& key) {
  std::ifstream f(p);
  for (std::string line; std::getline(f, line);) {
    if (!line.starts_with(key)) continue;
    const char* const value = line.c_str() + key.size();
    char* end = nullptr;
    const int64_t n = std::strtoll(value, &end, 10);
    return end == value ? std::nullopt : std::optional(n);
  }
  return std::nullopt;
}

}  // namespace

int64_t last_level_cache_bytes(const fs::path& root) {
  int64_t total = 0;
  std::set<std::string> seen;  // the CPUs that share a cache, as the kernel lists them
  std::error_code ec;
  for (const auto& cpu : fs::directory_iterator(root / "sys/devices/system/cpu", ec)) {
    if (cpu.path().filename().string().rfind("cpu", 0) != 0) continue;
    int64_t level = 0, bytes = 0;
    std::string shared;
    std::error_code none;
    for (const auto& index : fs::directory_iterator(cpu.path() / "cache", none)) {
      if (index.path().filename().string().rfind("index", 0) != 0) continue;
      const int64_t l = parse_size(first_line(index.path() / "level"));
      if (l <= level) continue;
      level = l;
      bytes = parse_size(first_line(index.path() / "size"));
      shared = first_line(index.path() / "shared_cpu_list");
    }
    if (level > 0 && seen.insert(shared).second) total += bytes;
  }
  return total;
}

int64_t available_memory(const fs::path& root) {
  int64_t least = std::numeric_limits<int64_t>::max();
  if (const auto kb = field(root / "proc/meminfo", "MemAvailable:")) least = *kb * 1024;
  visit_cgroups(root, "memory", [&](const fs::path& dir, bool v2) {
    const auto limit = number(dir / (v2 ? "memory.max" : "memory.limit_in_bytes"));
    const auto used = number(dir / (v2 ? "memory.current" : "memory.usage_in_bytes"));
    if (!limit) return;
    const int64_t cache = field(dir / "memory.stat", v2 ? "file " : "total_cache ").value_or(0);
    least = std::min(least, std::max<int64_t>(0, *limit - used.value_or(0) + cache));
  });
  for (const auto& [limit, used] : {std::pair("Max address space", "VmSize:"), {"Max data size", "VmData:"}})
    if (const auto most = field(root / "proc/self/limits", limit)) {
      const int64_t taken = field(root / "proc/self/status", used).value_or(0) * 1024;
      least = std::min(least, std::max<int64_t>(0, *most - taken));
    }
  return least;
}

}  // namespace mi::hw
