#pragma once
// JSON of answers: log-probabilities, usage, choices.

#include <string>

#include "base/json.h"
#include "base/utf8.h"
#include "runtime/request.h"
#include "text/tokenizer.h"

namespace mi::server {

// A token as the completions endpoint names it: its text, or "bytes:\xe6\xbc" where it is no text on its own, so that
// names of different tokens differ.
std::string token_name(std::string_view bytes);
int64_t count_characters(std::string_view utf8);

// {"token", "logprob", "bytes", "top_logprobs"} of the chat endpoint.
Json chat_logprob(const text::Tokenizer& t, int32_t token, float logprob,
                  const std::vector<runtime::TokenLogprob>& top);

// {"tokens", "token_logprobs", "top_logprobs", "text_offset"} of the completions endpoint, built token by token.
class CompletionLogprobs {
 public:
  explicit CompletionLogprobs(const text::Tokenizer& t, int64_t first_offset = 0)
      : tokenizer_(t), offset_(first_offset) {}
  // scored false: the first token of an echoed prompt, which nothing stands before.
  void add(int32_t token, float logprob, const std::vector<runtime::TokenLogprob>& top, bool scored = true);
  bool empty() const { return tokens_.empty(); }
  Json take();  // what was added since the last take
  // The order of bytes: completions list the tokens whose text is sent.
  int64_t offset() const { return offset_; }

 private:
  const text::Tokenizer& tokenizer_;
  int64_t offset_;
  Json tokens_ = Json::array(), logprobs_ = Json::array(), tops_ = Json::array(), offsets_ = Json::array();
};

Json usage_json(int64_t prompt, int64_t completion, int64_t cached);

}  // namespace mi::server
