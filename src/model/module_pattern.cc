#include "model/module_pattern.h"

#include <algorithm>
#include <cctype>

namespace mi::model {
namespace {

// Matching without backtracking, so that no pattern takes for ever or deep recursion.
constexpr auto kRegexFlags = std::regex::ECMAScript | std::regex_constants::__polynomial;
// The matcher still recurses from state to state, and a count makes copies of them.
constexpr int64_t kMaxStates = 10000;
constexpr size_t kMaxLength = 1000;  // of a pattern, and of a name

// All counts of a pattern ("{8}", "{2,5}") multiplied: what repetition makes of one state at most.
int64_t repeats(const std::string& p) {
  int64_t product = 1;
  for (size_t i = p.find('{'); i != std::string::npos; i = p.find('{', i + 1)) {
    int64_t most = 1, n = 0;
    for (size_t j = i + 1; j < p.size() && (std::isdigit(static_cast<unsigned char>(p[j])) || p[j] == ','); ++j) {
      n = p[j] == ',' ? 0 : std::min(n * 10 + (p[j] - '0'), kMaxStates);
      most = std::max(most, n);
    }
    product = std::min(product * most, kMaxStates);
  }
  return product;
}

// The library's own words differ from one to the next.
const char* what_is_wrong(std::regex_constants::error_type e) {
  using namespace std::regex_constants;
  if (e == error_paren) return "a parenthesis is not closed, or was not opened";
  if (e == error_brack) return "a [ is not closed";
  if (e == error_brace || e == error_badbrace) return "the braces of a count are not closed, or hold no count";
  if (e == error_range) return "a range in [ ] runs backwards";
  if (e == error_badrepeat) return "nothing stands before a *, + or ?";
  if (e == error_escape) return "a \\ stands before something that it does not go with";
  if (e == error_backref || e == error_complexity) return "it refers back to a group (\\1), which is not supported";
  if (e == error_stack || e == error_space) return "it is too large";
  return "it cannot be read";
}

}  // namespace

Result<ModulePattern> ModulePattern::read(const std::string& text, const std::string& what) {
  MI_CHECK(is_one(text), "{}", text);
  if (text.size() > kMaxLength) return bad_input("{}: a pattern of {} characters", what, text.size());
  if (repeats(text) * int64_t(text.size()) > kMaxStates)
    return bad_input("{}: the counts in '{}' repeat too much: write the pattern without them", what, text);
  try {
    return ModulePattern(std::regex(text.substr(3), kRegexFlags));
  } catch (const std::regex_error& e) {
    return bad_input("{}: '{}' is not a valid pattern: {}", what, text, what_is_wrong(e.code()));
  }
}

bool ModulePattern::matches(const std::string& module) const {
  return module.size() < kMaxLength && std::regex_search(module, rx_, std::regex_constants::match_continuous);
}

}  // namespace mi::model
