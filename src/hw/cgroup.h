#pragma once
// The control groups of this process, versions 1 and 2, for who reads their limits.

#include <filesystem>
#include <functional>
#include <string_view>

namespace mi::hw {

// Calls visit for each directory that may hold a limit of `controller` ("cpu", "memory"): this process's group and all
// its parents, of either version, read under `root` (tests give a made-up tree). A directory may not exist.
using CgroupVisit = std::function<void(const std::filesystem::path& dir, bool v2)>;
void visit_cgroups(const std::filesystem::path& root, std::string_view controller, const CgroupVisit& visit);

}  // namespace mi::hw
