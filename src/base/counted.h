#pragma once
// Numbers of things, for people.

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace mi {

// "1 thread", "2 threads"
inline std::string counted(int64_t n, std::string_view noun) { return fmt::format("{} {}{}", n, noun, n == 1 ? "" : "s"); }

}  // namespace mi
