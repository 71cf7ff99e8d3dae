#pragma once
// Checks for bugs. MI_CHECK is always on; MI_DCHECK only where MI_DCHECK_ON is defined (the dev and sanitizer
// presets). Both print the place, the condition and the message, then abort. Never reachable from user input:
// what a user can cause is an Error (result.h).

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>

namespace mi::detail {
[[noreturn]] inline void check_failed(const char* file, int line, const char* cond, const std::string& message) {
  std::fprintf(stderr, "%s:%d: check failed: %s %s\n", file, line, cond, message.c_str());
  std::fflush(stderr);
  std::abort();
}
inline std::string check_message() { return {}; }
template <typename... Args>
std::string check_message(fmt::format_string<Args...> f, Args&&... args) {
  return fmt::format(f, std::forward<Args>(args)...);
}
}  // namespace mi::detail

#define MI_CHECK(cond, ...)                                                                               \
  do {                                                                                                    \
    if (!(cond)) [[unlikely]]                                                                             \
      ::mi::detail::check_failed(__FILE__, __LINE__, #cond, ::mi::detail::check_message(__VA_ARGS__));    \
  } while (0)
#define MI_CHECK_EQ(a, b) MI_CHECK((a) == (b), "({} vs {})", (a), (b))
#define MI_CHECK_LE(a, b) MI_CHECK((a) <= (b), "({} vs {})", (a), (b))
#define MI_CHECK_LT(a, b) MI_CHECK((a) < (b), "({} vs {})", (a), (b))

#ifdef MI_DCHECK_ON
#  define MI_DCHECK(...) MI_CHECK(__VA_ARGS__)
#else
#  define MI_DCHECK(...) \
    do {                 \
    } while (0)
#endif
