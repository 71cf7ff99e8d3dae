#include "hw/memory_limit.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <limits>

#include "hw/cgroup.h"

namespace mi::hw {
namespace {

namespace fs = std::filesystem;

std::optional<int64_t> number(const fs::path& p) {
  const auto line = first_line(p);
  if (!line || line->empty() || line->find_first_not_of("0123456789") != std::string::npos) return std::nullopt;
  return int64_t(std::strtoull(line->c_str(), nullptr, 10));
}

// The number behind "key" in a file of "key value" lines.
std::optional<int64_t> field(const fs::path& p, const std::string& key) {
  std::ifstream f(p);
  for (std::string line; std::getline(f, line);) {
    if (line.starts_with(key)) return std::strtoll(line.c_str() + key.size(), nullptr, 10);
  }
  return std::nullopt;
}

}  // namespace

int64_t available_memory(const fs::path& root) {
  int64_t least = std::numeric_limits<int64_t>::max();
  if (const auto kb = field(root / "proc/meminfo", "MemAvailable:")) least = *kb * 1024;
  each_cgroup(root, "memory", [&](const fs::path& dir, int version) {
    const auto limit = number(dir / (version == 2 ? "memory.max" : "memory.limit_in_bytes"));
    const auto used = number(dir / (version == 2 ? "memory.current" : "memory.usage_in_bytes"));
    if (!limit || !used) return;
    const int64_t cache = field(dir / "memory.stat", version == 2 ? "file " : "total_cache ").value_or(0);
    least = std::min(least, std::max<int64_t>(0, *limit - *used + cache));
  });
  return least;
}

}  // namespace mi::hw
