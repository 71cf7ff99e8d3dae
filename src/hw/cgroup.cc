#include "hw/cgroup.h"

#include <fstream>
#include <string>

namespace mi::hw {
namespace {

namespace fs = std::filesystem;

void walk_up(const fs::path& mount, const std::string& group, bool v2, const CgroupVisit& visit) {
  fs::path rel = fs::path(group).relative_path();
  while (true) {
    visit(mount / rel, v2);
    if (rel.empty()) return;
    rel = rel.parent_path();
  }
}

}  // namespace

void visit_cgroups(const fs::path& root, std::string_view controller, const CgroupVisit& visit) {
  const fs::path mounts = root / "sys/fs/cgroup";
  const std::string name(controller);
  std::ifstream f(root / "proc/self/cgroup");
  for (std::string line; std::getline(f, line);) {
    const size_t a = line.find(':'), b = a == std::string::npos ? a : line.find(':', a + 1);
    if (b == std::string::npos) continue;
    const std::string controllers = line.substr(a + 1, b - a - 1), group = line.substr(b + 1);
    if (controllers.empty()) {
      walk_up(mounts, group, true, visit);
      walk_up(mounts / "unified", group, true, visit);
    } else if (("," + controllers + ",").find("," + name + ",") != std::string::npos) {
      walk_up(mounts / name, group, false, visit);
      if (controllers != name) walk_up(mounts / controllers, group, false, visit);
      if (name == "cpu")
        walk_up(mounts / "cpuacct,cpu", group, false, visit);  // some systems mount the pair in this order
    }
  }
}

}  // namespace mi::hw
