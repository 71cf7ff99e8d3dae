#pragma once
// The control groups of this process, read under `root` ("/"; tests give made-up trees).

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace mi::hw {

// f(directory, version) for each group of this process that limits `controller` ("cpu", "memory") and for all its parents;
// version 1 or 2.
void each_cgroup(const std::filesystem::path& root, std::string_view controller, const std::function<void(const std::filesystem::path&, int version)>& f);

std::optional<std::string> first_line(const std::filesystem::path& p);

}  // namespace mi::hw
