#include "runtime/output_text.h"

namespace mi::runtime {

OutputText::OutputText(std::shared_ptr<const text::Tokenizer> tokenizer, bool skip_special,
                       std::vector<std::string> stops, int64_t min_tokens)
    : matcher_(std::move(stops)), free_tokens_(min_tokens) {
  if (tokenizer) decoder_.emplace(std::move(tokenizer), skip_special);
}

std::string OutputText::push(int32_t token) {
  if (!decoder_) return {};
  std::string piece = decoder_->push(token);
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
