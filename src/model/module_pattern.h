#pragma once
// "re:..." patterns over module names, as recipes and checkpoints give them. Untrusted: no pattern makes reading or
// matching take for ever or recurse deeply.

#include <regex>
#include <string>

#include "base/result.h"

namespace mi::model {

class ModulePattern {
 public:
  static bool is_one(const std::string& text) { return text.starts_with("re:"); }
  // Precondition: is_one(text). `what` names the source in errors.
  static Result<ModulePattern> read(const std::string& text, const std::string& what);
  // From the start of the name; the end need not be reached.
  bool matches(const std::string& module) const;

 private:
  explicit ModulePattern(std::regex rx) : rx_(std::move(rx)) {}
  std::regex rx_;
};

}  // namespace mi::model
