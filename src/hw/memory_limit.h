#pragma once
// Memory that this process can still take.

#include <cstdint>
#include <filesystem>

namespace mi::hw {

// Bytes: the least of what the kernel calls available and of what the control groups' limits leave (their page cache counts
// as free). INT64_MAX where nothing says.
int64_t available_memory(const std::filesystem::path& root = "/");

}  // namespace mi::hw
