#include "runtime/draft.h"

#include <algorithm>

namespace mi::runtime {

std::vector<int32_t> repeat_draft(std::span<const int32_t> tokens, int64_t most) {
  constexpr size_t kLongest = 4, kShortest = 2, kWindow = 8192;
  if (tokens.size() > kWindow) tokens = tokens.last(kWindow);
  for (size_t n = kLongest; n >= kShortest; --n) {
    if (tokens.size() <= n) continue;
    const std::span<const int32_t> end = tokens.last(n);
    for (size_t at = tokens.size() - n; at-- > 0;) {
      if (!std::equal(end.begin(), end.end(), tokens.begin() + std::ptrdiff_t(at))) continue;
      const size_t first = at + n, count = std::min(tokens.size() - first, size_t(most));
      return {tokens.begin() + std::ptrdiff_t(first), tokens.begin() + std::ptrdiff_t(first + count)};
    }
  }
  return {};
}

}  // namespace mi::runtime
