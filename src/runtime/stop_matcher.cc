#include "runtime/stop_matcher.h"

namespace mi::runtime {

StopMatcher::StopMatcher(std::vector<std::string> stops) : stops_(std::move(stops)) {
  std::erase_if(stops_, [](const std::string& s) { return s.empty(); });
}

std::string StopMatcher::push(std::string_view piece) {
  if (matched_) return {};
  if (stops_.empty()) return std::string(piece);
  held_ += piece;
  return scan(false);
}

std::string StopMatcher::finish() {
  if (matched_) return {};
  return scan(true);
}

// Walks the possible starts from the left. A complete match cuts there; an unfinished one (the rest of the text is a
// beginning of a stop string) holds from there, even if another string matches further right: its start is earlier.
std::string StopMatcher::scan(bool at_end) {
  std::string_view text = held_;
  size_t keep = text.size();  // first byte that is not released
  for (size_t start = 0; start < text.size() && keep == text.size(); ++start) {
    std::string_view rest = text.substr(start);
    for (const std::string& stop : stops_) {
      if (rest.starts_with(stop)) {
        if (!matched_ || stop.size() < matched_->size())
          matched_ = stop;  // of several at one place the one complete first
        keep = start;
      } else if (!at_end && rest.size() < stop.size() && std::string_view(stop).starts_with(rest)) {
        keep = start;
      }
    }
  }
  std::string out = held_.substr(0, keep);
  held_ = matched_ ? std::string() : held_.substr(keep);
  return out;
}

}  // namespace mi::runtime
