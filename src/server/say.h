#pragma once
// Lines that the running server prints. A log that cannot be written (its disk is full, its reader has left) is no
// reason to stop serving.

#include <fmt/format.h>

#include <cstdio>

namespace mi::server {

template <typename... Args>
void say(fmt::format_string<Args...> f, Args&&... args) {
  std::fputs(fmt::format(f, std::forward<Args>(args)...).c_str(), stdout);
  std::fflush(stdout);
}

}  // namespace mi::server
