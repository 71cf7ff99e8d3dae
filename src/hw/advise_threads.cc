// How many threads this process should use: the affinity mask, cut by the CPU quota of its control groups.
#include <sched.h>

#include <cmath>
#include <fstream>
#include <sstream>

#include "base/counted.h"
#include "hw/cgroup.h"
#include "hw/cpu_quota.h"
#include "hw/thread_pool.h"

namespace mi::hw {
namespace {

namespace fs = std::filesystem;

std::optional<std::string> readable_line(const fs::path& p) {
  std::ifstream f(p);
  std::string line;
  if (!std::getline(f, line)) return std::nullopt;
  return line;
}

// cpu.max: "QUOTA PERIOD" or "max PERIOD".
std::optional<double> quota_v2(const fs::path& dir) {
  const auto line = readable_line(dir / "cpu.max");
  if (!line) return std::nullopt;
  std::istringstream in(*line);
  double quota = 0, period = 0;
  if (!(in >> quota >> period) || quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}
std::optional<double> quota_v1(const fs::path& dir) {
  const auto q = readable_line(dir / "cpu.cfs_quota_us"), p = readable_line(dir / "cpu.cfs_period_us");
  if (!q || !p) return std::nullopt;
  const double quota = std::atof(q->c_str()), period = std::atof(p->c_str());
  if (quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

}  // namespace

std::optional<double> cpu_quota(const fs::path& root) {
  std::optional<double> least;
  visit_cgroups(root, "cpu", [&](const fs::path& dir, bool v2) {
    if (const auto q = v2 ? quota_v2(dir) : quota_v1(dir); q && (!least || *q < *least)) least = q;
  });
  return least;
}

ThreadAdvice advise_from(int cpus, std::optional<double> quota) {
  if (!quota || *quota >= cpus) return {cpus, counted(cpus, "CPU") + " in the affinity mask"};
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
