// Reasoning between marks, before the answer.
#include "server/reply/scan.h"

namespace mi::server {
namespace {

constexpr const char* kBlank = " \t\r\n";

class Reasoning : public StepSplitter {
 public:
  Reasoning(std::string begin, std::string end, bool open, std::unique_ptr<ToolSplitter> rest)
      : begin_(std::move(begin)), end_(std::move(end)), rest_(std::move(rest)), at_(open ? At::kInside : At::kStart) {}

  std::vector<ToolPiece> finish() override {
    std::vector<ToolPiece> out;
    const std::string left = std::exchange(pending_, {});
    if (at_ == At::kInside)
      reason(left, &out);
    else if (at_ != At::kAfter)
      pass(left, &out);
    if (rest_)
      for (ToolPiece& p : rest_->finish()) add(std::move(p), &out);
    return out;
  }

 private:
  enum class At : uint8_t { kStart, kInside, kAfter, kRest };

  bool step(std::vector<ToolPiece>* out) override {
    switch (at_) {
      case At::kStart: {
        // Blanks, then a mark or not; a mere end mark says that there is no reasoning.
        const size_t at = pending_.find_first_not_of(kBlank);
        if (at == std::string::npos) return false;
        const std::string_view text = std::string_view(pending_).substr(at);
        for (const auto& [mark, next] : {std::pair{&begin_, At::kInside}, std::pair{&end_, At::kAfter}}) {
          if (text.substr(0, mark->size()) == *mark) {
            pending_.erase(0, at + mark->size());
            at_ = next;
            return true;
          }
        }
        for (const std::string* mark : {&begin_, &end_})
          if (mark->compare(0, text.size(), text) == 0) return false;
        at_ = At::kRest;
        pass(std::exchange(pending_, {}), out);
        return false;
      }
      case At::kInside: {
        const size_t at = pending_.find(end_);
        if (at == std::string::npos) {
          // Blanks before the end mark are not part of it.
          size_t keep = held_back(pending_, end_);
          while (keep < pending_.size() && isspace(static_cast<unsigned char>(pending_[pending_.size() - keep - 1])))
            ++keep;
          reason(pending_.substr(0, pending_.size() - keep), out);
          pending_.erase(0, pending_.size() - keep);
          return false;
        }
        std::string text = pending_.substr(0, at);
        text.erase(text.find_last_not_of(kBlank) + 1);
        reason(std::move(text), out);
        pending_.erase(0, at + end_.size());
        at_ = At::kAfter;
        return true;
      }
      case At::kAfter: {
        const size_t at = pending_.find_first_not_of(kBlank);
        if (at == std::string::npos) return false;
        at_ = At::kRest;
        pass(std::exchange(pending_, {}).substr(at), out);
        return false;
      }
      case At::kRest:
        pass(std::exchange(pending_, {}), out);
        return false;
    }
    return false;
  }
  void reason(std::string text, std::vector<ToolPiece>* out) {
    if (!any_) text.erase(0, std::min(text.find_first_not_of(kBlank), text.size()));
    any_ = any_ || !text.empty();
    add_piece(out, ToolPiece::kReasoning, std::move(text));
  }
  void pass(std::string text, std::vector<ToolPiece>* out) {
    if (!rest_) return add_piece(out, ToolPiece::kContent, std::move(text));
    for (ToolPiece& p : rest_->push(text)) add(std::move(p), out);
  }
  static void add(ToolPiece p, std::vector<ToolPiece>* out) {
    if (p.kind == ToolPiece::kCallBegin)
      out->push_back(std::move(p));
    else
      add_piece(out, p.kind, std::move(p.text));
  }

  const std::string begin_, end_;
  const std::unique_ptr<ToolSplitter> rest_;
  At at_;
  bool any_ = false;
};

}  // namespace

std::unique_ptr<ToolSplitter> split_reasoning(std::string begin, std::string end, bool open,
                                              std::unique_ptr<ToolSplitter> rest) {
  return std::make_unique<Reasoning>(std::move(begin), std::move(end), open, std::move(rest));
}

}  // namespace mi::server
