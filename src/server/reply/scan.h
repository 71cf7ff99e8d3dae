#pragma once
// What the splitters of this folder share: marks in text, a loop of steps, the text outside of calls.

#include <optional>

#include "server/reply/reply.h"

namespace mi::server {

struct FoundMark {
  size_t at = 0, which = 0;
};
// The first mark in s; of two at the same place the longer one.
inline std::optional<FoundMark> first_mark(std::string_view s, const std::vector<std::string>& marks) {
  std::optional<FoundMark> found;
  for (size_t i = 0; i < marks.size(); ++i) {
    const size_t at = s.find(marks[i]);
    if (at == std::string_view::npos) continue;
    if (!found || at < found->at || (at == found->at && marks[i].size() > marks[found->which].size()))
      found = FoundMark{at, i};
  }
  return found;
}
inline size_t held_by_any(std::string_view s, const std::vector<std::string>& marks) {
  size_t n = 0;
  for (const std::string& m : marks) n = std::max(n, held_back(s, m));
  return n;
}
inline bool all_blank(std::string_view s) { return s.find_first_not_of(" \t\r\n") == std::string_view::npos; }
inline std::string trimmed(std::string_view s) {
  const size_t first = s.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos) return {};
  return std::string(s.substr(first, s.find_last_not_of(" \t\r\n") + 1 - first));
}

class StepSplitter : public ToolSplitter {
 public:
  std::vector<ToolPiece> push(std::string_view text) final {
    std::vector<ToolPiece> out;
    pending_ += text;
    while (step(&out)) {
    }
    return out;
  }

 protected:
  // Takes a beginning off pending_; false: more text is needed for the next step.
  virtual bool step(std::vector<ToolPiece>* out) = 0;
  std::string pending_;
};

// The mark of a call comes first, so that it wins where it is also the mark of a section.
inline std::vector<std::string> call_and_sections(const std::string& call, std::vector<std::string> sections) {
  sections.insert(sections.begin(), call);
  return sections;
}

// The text outside of calls: content, and marks that end it. Blanks between marks are not content.
class Outside {
 public:
  explicit Outside(std::vector<std::string> marks) : marks_(std::move(marks)) {}
  // Takes content off `pending`, and the mark if there is a whole one: its index.
  std::optional<size_t> take(std::string* pending, std::vector<ToolPiece>* out) {
    const auto found = first_mark(*pending, marks_);
    const size_t n = found ? found->at : pending->size() - held_by_any(*pending, marks_);
    content(pending->substr(0, n), out);
    pending->erase(0, n + (found ? marks_[found->which].size() : 0));
    if (!found) return std::nullopt;
    blank_.clear();
    gap_ = true;
    return found->which;
  }
  void content(std::string text, std::vector<ToolPiece>* out) {
    if (gap_) {
      blank_ += text;
      if (all_blank(blank_)) return;
      text = std::exchange(blank_, {});
      gap_ = false;
    }
    add_piece(out, ToolPiece::kContent, std::move(text));
  }

 private:
  const std::vector<std::string> marks_;
  bool gap_ = false;  // nothing but blanks since the last mark
  std::string blank_;
};

}  // namespace mi::server
