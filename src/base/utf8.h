#pragma once
// UTF-8 from outside.

#include <string>
#include <string_view>

namespace mi {

// Bytes of the character that starts at s[i]; 0 if it is broken there (overlong, a surrogate, cut off, above U+10FFFF).
size_t utf8_bytes(std::string_view s, size_t i);

// Valid UTF-8: each broken byte becomes U+FFFD.
std::string clean_utf8(std::string_view bytes);

// The same, of at most `most` characters (> 0): where some are left out, the last one is "…". For messages that repeat
// what somebody sent.
std::string shortened(std::string_view bytes, size_t most = 64);

}  // namespace mi
