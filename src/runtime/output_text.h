#pragma once
// The text side of one request: token ids to whole characters, characters to text before the first stop string.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/stop_matcher.h"
#include "text/tokenizer.h"

namespace mi::runtime {

class OutputText {
 public:
  // tokenizer may be null: all text is "". Stop strings count only in the text of tokens after the first min_tokens.
  // shown: special tokens that leave text although skip_special is set.
  OutputText(std::shared_ptr<const text::Tokenizer> tokenizer, bool skip_special, std::vector<std::string> stops,
             int64_t min_tokens, std::vector<int32_t> shown = {});
  std::string push(int32_t token);  // text that is now certain
  std::string finish();             // what was held back; may still complete a stop string
  const std::optional<std::string>& stopped_by() const { return matcher_.matched(); }

 private:
  std::shared_ptr<const text::Tokenizer> tokenizer_;
  std::vector<int32_t> shown_;  // not empty: the other special tokens are left out here, not by the decoder
  std::optional<text::StreamDecoder> decoder_;
  StopMatcher matcher_;
  int64_t free_tokens_;  // tokens still to come whose text is not matched
};

}  // namespace mi::runtime
