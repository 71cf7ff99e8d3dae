#include "hw/memory.h"

#include <algorithm>
#include <fstream>
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
  int64_t least = 0;
  const auto take = [&](int64_t bytes) {
    if (bytes > 0 && (least == 0 || bytes < least)) least = bytes;
  };
  std::ifstream f(root / "proc/meminfo");
  for (std::string line; std::getline(f, line);)
    if (line.rfind("MemAvailable:", 0) == 0) take(std::atoll(line.c_str() + 13) * 1024);
  visit_cgroups(root, "memory", [&](const fs::path& dir, bool v2) {
    take(std::atoll(first_line(dir / (v2 ? "memory.max" : "memory.limit_in_bytes")).c_str()));  // "max" is 0: no limit
  });
  return least;
}

}  // namespace mi::hw
