#pragma once
// The parts of advise_threads() that tests feed with made-up file trees.

#include <fmt/format.h>

#include <filesystem>
#include <optional>

#include "hw/thread_pool.h"

namespace mi::hw {

// The least CPU quota (in CPUs, may be fractional) of this process's control group and its parents, v1 and v2, read
// under `root`; nullopt without a limit.
std::optional<double> cpu_quota(const std::filesystem::path& root);

// min(cpus, quota rounded down), at least 1.
ThreadAdvice advise_from(int cpus, std::optional<double> quota);

}  // namespace mi::hw
