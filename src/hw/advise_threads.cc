// How many threads this process should use: the affinity mask, cut by the CPU quota of its control groups.
#include <sched.h>

#include <cmath>
#include <fstream>
#include <sstream>

#include "hw/cpu_quota.h"
#include "hw/thread_pool.h"

namespace mi::hw {
namespace {

namespace fs = std::filesystem;

std::optional<std::string> first_line(const fs::path& p) {
  std::ifstream f(p);
  std::string line;
  if (!std::getline(f, line)) return std::nullopt;
  return line;
}

// cpu.max: "QUOTA PERIOD" or "max PERIOD".
std::optional<double> quota_v2(const fs::path& dir) {
  const auto line = first_line(dir / "cpu.max");
  if (!line) return std::nullopt;
  std::istringstream in(*line);
  double quota = 0, period = 0;
  if (!(in >> quota >> period) || quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}
std::optional<double> quota_v1(const fs::path& dir) {
  const auto q = first_line(dir / "cpu.cfs_quota_us"), p = first_line(dir / "cpu.cfs_period_us");
  if (!q || !p) return std::nullopt;
  const double quota = std::atof(q->c_str()), period = std::atof(p->c_str());
  if (quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

// The least quota of `group` and all its parents under `mount`.
template <typename Read>
void walk_up(const fs::path& mount, const std::string& group, Read read, std::optional<double>* least) {
  fs::path rel = fs::path(group).relative_path();
  while (true) {
    if (const auto q = read(mount / rel); q && (!*least || *q < **least)) *least = q;
    if (rel.empty()) return;
    rel = rel.parent_path();
  }
}

}  // namespace

std::optional<double> cpu_quota(const fs::path& root) {
  std::optional<double> least;
  std::ifstream f(root / "proc/self/cgroup");
  for (std::string line; std::getline(f, line);) {
    const size_t a = line.find(':'), b = a == std::string::npos ? a : line.find(':', a + 1);
    if (b == std::string::npos) continue;
    const std::string controllers = line.substr(a + 1, b - a - 1), group = line.substr(b + 1);
    if (controllers.empty()) {
      walk_up(root / "sys/fs/cgroup", group, quota_v2, &least);
      walk_up(root / "sys/fs/cgroup/unified", group, quota_v2, &least);
    } else if (("," + controllers + ",").find(",cpu,") != std::string::npos) {
      for (const char* name : {"cpu", "cpu,cpuacct", "cpuacct,cpu"}) walk_up(root / "sys/fs/cgroup" / name, group, quota_v1, &least);
    }
  }
  return least;
}

ThreadAdvice advise_from(int cpus, std::optional<double> quota) {
  if (!quota || *quota >= cpus) return {cpus, fmt::format("{} CPU{} in the affinity mask", cpus, cpus == 1 ? "" : "s")};
  const int n = std::max(1, int(std::floor(*quota + 1e-9)));
  return {n, fmt::format("a CPU quota of {:.2f} (of {} in the affinity mask)", *quota, cpus)};
}

ThreadAdvice advise_threads() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  const int cpus = sched_getaffinity(0, sizeof mask, &mask) == 0 ? std::max(1, CPU_COUNT(&mask)) : 1;
  return advise_from(cpus, cpu_quota("/"));
}

}  // namespace mi::hw
