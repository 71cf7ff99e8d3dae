#include "runtime/output_text.h"

#include <algorithm>

namespace mi::runtime {

OutputText::OutputText(std::shared_ptr<const text::Tokenizer> tokenizer, bool skip_special,
                       std::vector<std::string> stops, int64_t min_tokens, std::vector<int32_t> shown)
    : tokenizer_(std::move(tokenizer)),
      shown_(skip_special ? std::move(shown) : std::vector<int32_t>()),
      matcher_(std::move(stops)),
      free_tokens_(min_tokens) {
  if (tokenizer_) decoder_.emplace(tokenizer_, skip_special && shown_.empty());
}

std::string OutputText::push(int32_t token) {
  if (!decoder_) return {};
  std::string piece;
  const bool left_out = !shown_.empty() && tokenizer_->is_special(token) &&
                        std::find(shown_.begin(), shown_.end(), token) == shown_.end();
  if (!left_out) piece = decoder_->push(token);
  if (free_tokens_ > 0) {
    --free_tokens_;
    return piece;
  }
  return matcher_.push(piece);
}

std::string OutputText::finish() {
  if (!decoder_) return {};
  std::string out = matcher_.push(decoder_->finish());
  return out + matcher_.finish();
}

}  // namespace mi::runtime
