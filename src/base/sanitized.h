#pragma once
// Whether this is a sanitizer's build. It is ten to fifty times slower, so tests take a smaller form there of what only
// repeats the same code, never leave code out.

namespace mi {

#ifdef MI_SANITIZED
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace mi
