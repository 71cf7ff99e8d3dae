#include "hw/cgroup.h"

#include <fstream>

namespace mi::hw {

namespace fs = std::filesystem;

std::optional<std::string> first_line(const fs::path& p) {
  std::ifstream f(p);
  std::string line;
  if (!std::getline(f, line)) return std::nullopt;
  return line;
}

void each_cgroup(const fs::path& root, std::string_view controller, const std::function<void(const fs::path&, int)>& f) {
  const auto walk_up = [&](const fs::path& mount, const std::string& group, int version) {
    fs::path rel = fs::path(group).relative_path();
    while (true) {
      f(mount / rel, version);
      if (rel.empty()) return;
      rel = rel.parent_path();
    }
  };
  const fs::path mounts = root / "sys/fs/cgroup";
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t a = line.find(':'), b = a == std::string::npos ? a : line.find(':', a + 1);
    if (b == std::string::npos) continue;
    const std::string controllers = line.substr(a + 1, b - a - 1), group = line.substr(b + 1);
    if (controllers.empty()) {
      walk_up(mounts, group, 2);
      walk_up(mounts / "unified", group, 2);
    } else if (("," + controllers + ",").find("," + std::string(controller) + ",") != std::string::npos) {
      for (const std::string& name : {std::string(controller), controllers}) walk_up(mounts / name, group, 1);
      if (controllers == "cpuacct,cpu") walk_up(mounts / "cpu,cpuacct", group, 1);   // mounted under either order
    }
  }
}

}  // namespace mi::hw
