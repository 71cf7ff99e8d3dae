// Calls that are a header with the name, and a JSON object.
#include "server/reply/scan.h"

namespace mi::server {
namespace {

constexpr const char* kSeparator = "<｜tool▁sep｜>";
constexpr const char* kArguments = "<|tool_call_argument_begin|>";

// "function<sep>NAME\n```json\n", "NAME<sep>", "functions.NAME:0<|tool_call_argument_begin|>"
std::string name_in(std::string head) {
  if (const size_t at = head.find(kArguments); at != std::string::npos) head.resize(at);
  if (const size_t at = head.find(kSeparator); at != std::string::npos) {
    const std::string after = head.substr(at + std::string_view(kSeparator).size());
    const std::string line = trimmed(after.substr(0, after.find('\n')));
    const std::string before = trimmed(head.substr(0, at));
    return before == "function" && !line.empty() ? line : before;
  }
  std::string name = trimmed(head);
  if (name.rfind("functions.", 0) == 0) {
    name.erase(0, 10);
    const size_t colon = name.rfind(':');
    if (colon != std::string::npos && name.find_first_not_of("0123456789", colon + 1) == std::string::npos)
      name.resize(colon);
  }
  return name;
}

class Heads : public StepSplitter {
 public:
  explicit Heads(const HeadMarks& m) : marks_(m), outside_(call_and_sections(m.call, m.section)) {}

  std::vector<ToolPiece> finish() override {
    std::vector<ToolPiece> out;
    if (at_ == At::kHead)
      outside_.content(marks_.call + pending_, &out);
    else if (at_ == At::kOutside)
      outside_.content(pending_, &out);
    pending_.clear();
    return out;
  }

 private:
  enum class At : uint8_t { kOutside, kHead, kArguments, kAfter };

  bool step(std::vector<ToolPiece>* out) override {
    switch (at_) {
      case At::kOutside: {
        const auto mark = outside_.take(&pending_, out);
        if (!mark) return false;
        if (*mark == 0) at_ = At::kHead;
        return true;
      }
      case At::kHead: {
        const auto found = first_mark(pending_, {"{", marks_.call_end});
        if (!found) return false;
        const std::string name = name_in(pending_.substr(0, found->at));
        if (name.empty()) {
          const size_t n = found->at + (found->which == 0 ? 1 : marks_.call_end.size());
          outside_.content(marks_.call + pending_.substr(0, n), out);
          pending_.erase(0, n);
          at_ = At::kOutside;
          return true;
        }
        out->push_back({ToolPiece::kCallBegin, name});
        pending_.erase(0, found->at);
        if (found->which == 0) {
          depth_ = 0;
          in_string_ = escaped_ = false;
          at_ = At::kArguments;
        } else {
          add_piece(out, ToolPiece::kArguments, "{}");
          at_ = At::kAfter;
        }
        return true;
      }
      case At::kArguments: {
        size_t used = 0;
        bool whole = false;
        while (used < pending_.size() && !whole) whole = closes(pending_[used++]);
        add_piece(out, ToolPiece::kArguments, pending_.substr(0, used));
        pending_.erase(0, used);
        if (whole) at_ = At::kAfter;
        return whole;
      }
      case At::kAfter: {
        const auto found = first_mark(pending_, {marks_.call_end, marks_.call});
        if (!found) {
          pending_.erase(0, pending_.size() - held_by_any(pending_, {marks_.call_end, marks_.call}));
          return false;
        }
        pending_.erase(0, found->at + (found->which == 0 ? marks_.call_end.size() : 0));
        at_ = At::kOutside;
        return true;
      }
    }
    return false;
  }
  bool closes(char c) {
    if (in_string_) {
      if (escaped_)
        escaped_ = false;
      else if (c == '\\')
        escaped_ = true;
      else if (c == '"')
        in_string_ = false;
      return false;
    }
    if (c == '"') in_string_ = true;
    if (c == '{' || c == '[') ++depth_;
    return (c == '}' || c == ']') && --depth_ == 0;
  }

  const HeadMarks marks_;
  Outside outside_;
  At at_ = At::kOutside;
  int depth_ = 0;
  bool in_string_ = false, escaped_ = false;
};

// <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
// <|message|>{...}<|call|>. The prompt ends with <|start|>assistant, so a header comes first.
class Harmony : public StepSplitter {
 public:
  std::vector<ToolPiece> finish() override {
    std::vector<ToolPiece> out;
    if (!header_)
      body(std::exchange(pending_, {}), &out);
    else if (!began_)
      add_piece(&out, ToolPiece::kContent, std::exchange(pending_, {}));
    if (call_ && !header_ && !any_) add_piece(&out, ToolPiece::kArguments, "{}");
    return out;
  }

 private:
  bool step(std::vector<ToolPiece>* out) override {
    if (header_) {
      // An answer that begins without any header is content.
      if (!began_) {
        for (const char* mark : {"<|channel|>", "<|start|>", "<|message|>", " to="}) {
          const std::string_view m = mark;
          const std::string_view p = std::string_view(pending_).substr(0, m.size());
          if (p == m) began_ = true;
          if (p == m.substr(0, p.size()) && p.size() < m.size()) return false;
        }
        if (!began_) {
          began_ = true;
          header_ = false;
          kind_ = ToolPiece::kContent;
          return !pending_.empty();
        }
      }
      const size_t at = pending_.find("<|message|>");
      if (at == std::string::npos) return false;
      open(pending_.substr(0, at), out);
      pending_.erase(0, at + 11);
      header_ = false;
      return true;
    }
    const std::vector<std::string> ends = {"<|end|>", "<|call|>", "<|return|>", "<|start|>"};
    const auto found = first_mark(pending_, ends);
    const size_t n = found ? found->at : pending_.size() - held_by_any(pending_, ends);
    body(pending_.substr(0, n), out);
    pending_.erase(0, n + (found ? ends[found->which].size() : 0));
    if (!found) return false;
    if (call_ && !any_) add_piece(out, ToolPiece::kArguments, "{}");
    header_ = true;
    return true;
  }
  void open(const std::string& header, std::vector<ToolPiece>* out) {
    const std::string to = "to=functions.";
    const size_t recipient = header.find(to);
    call_ = recipient != std::string::npos;
    any_ = false;
    if (call_) {
      const size_t from = recipient + to.size();
      out->push_back({ToolPiece::kCallBegin, header.substr(from, header.find_first_of(" <\n\t", from) - from)});
    }
    const size_t channel = header.find("<|channel|>");
    const bool analysis = channel != std::string::npos && header.compare(channel + 11, 8, "analysis") == 0;
    kind_ = call_ ? ToolPiece::kArguments : analysis ? ToolPiece::kReasoning : ToolPiece::kContent;
  }
  void body(std::string text, std::vector<ToolPiece>* out) {
    any_ = any_ || !text.empty();
    add_piece(out, kind_, std::move(text));
  }

  bool header_ = true, began_ = false, call_ = false, any_ = false;
  ToolPiece::Kind kind_ = ToolPiece::kContent;
};

}  // namespace

std::unique_ptr<ToolSplitter> split_heads(const HeadMarks& marks) { return std::make_unique<Heads>(marks); }
std::unique_ptr<ToolSplitter> split_harmony() { return std::make_unique<Harmony>(); }

}  // namespace mi::server
