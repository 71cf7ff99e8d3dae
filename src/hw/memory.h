#pragma once
// Memory and caches of the machine, read under `root` ("/"; tests give a made-up tree).

#include <cstdint>
#include <filesystem>

namespace mi::hw {

// The last-level caches of all CPUs together; 0: unknown.
int64_t last_level_cache_bytes(const std::filesystem::path& root);

// What this process may still take: the least of the kernel's estimate and of what the limits of its control groups (their
// page cache counts as free) and its own (ulimit -v, ulimit -d) leave. INT64_MAX where nothing says.
int64_t available_memory(const std::filesystem::path& root);

}  // namespace mi::hw
