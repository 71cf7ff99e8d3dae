#include "base/utf8.h"

#include <algorithm>

namespace mi {

size_t utf8_bytes(std::string_view s, size_t i) {
  const auto b = [&](size_t k) { return static_cast<unsigned char>(s[i + k]); };
  const unsigned char c = b(0);
  const size_t n = c < 0x80 ? 1 : c >= 0xc2 && c < 0xe0 ? 2 : (c & 0xf0) == 0xe0 ? 3 : c >= 0xf0 && c < 0xf5 ? 4 : 0;
  if (n == 0 || i + n > s.size()) return 0;
  for (size_t k = 1; k < n; ++k)
    if ((b(k) & 0xc0) != 0x80) return 0;
  if (c == 0xe0 && b(1) < 0xa0) return 0;      // overlong
  if (c == 0xed && b(1) >= 0xa0) return 0;     // surrogate
  if (c == 0xf0 && b(1) < 0x90) return 0;      // overlong
  if (c == 0xf4 && b(1) >= 0x90) return 0;     // above U+10FFFF
  return n;
}

std::string clean_utf8(std::string_view s) {
  std::string out;
  for (size_t i = 0; i < s.size();) {
    const size_t n = utf8_bytes(s, i);
    if (n == 0) {
      out += "\xef\xbf\xbd";
      ++i;
    } else {
      out += s.substr(i, n);
      i += n;
    }
  }
  return out;
}

std::string shortened(std::string_view s, size_t most) {
  size_t characters = 0, kept = 0;  // kept: bytes of all but the last character that fit
  for (size_t i = 0; i < s.size(); ++characters) {
    if (characters + 1 == most) kept = i;
    if (characters == most) return clean_utf8(s.substr(0, kept)) + "…";
    i += std::max<size_t>(utf8_bytes(s, i), 1);
  }
  return clean_utf8(s);
}

}  // namespace mi
