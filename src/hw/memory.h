#pragma once
// Memory and caches of the machine, read under `root` ("/"; tests give a made-up tree).

#include <cstdint>
#include <filesystem>

namespace mi::hw {

// The last-level caches of all CPUs together; 0: unknown.
int64_t last_level_cache_bytes(const std::filesystem::path& root);

// What a program may still take: the kernel's estimate, or the least limit of this process's control groups when that
// is less; 0: unknown.
int64_t available_memory(const std::filesystem::path& root);

}  // namespace mi::hw
