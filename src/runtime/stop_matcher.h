#pragma once
// Finds stop strings in text that arrives in pieces, and holds back only what may still become one. The match that
// starts first wins; text before it is released, nothing from it on is.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace mi::runtime {

class StopMatcher {
 public:
  // Empty strings are dropped; with none left everything passes straight through.
  explicit StopMatcher(std::vector<std::string> stops);
  // Text that is certainly before any stop string. After a match: "".
  std::string push(std::string_view piece);
  // The text has ended for another reason: what was held, up to a complete match in it if there is one.
  std::string finish();
  // The string that matched.
  const std::optional<std::string>& matched() const { return matched_; }

 private:
  std::string scan(bool at_end);

  std::vector<std::string> stops_;
  std::string held_;
  std::optional<std::string> matched_;
};

}  // namespace mi::runtime
