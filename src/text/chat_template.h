#pragma once
// A model's chat template (Jinja), rendered by minijinja with the functions that Hugging Face templates rely on.
// Loaded and compiled once: a template that can't be parsed is refused with row and column, never replaced.

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "text/tokenizer.h"

namespace mi::text {

struct TemplateVars {
  std::string bos_token, eos_token, pad_token, unk_token;
};

struct Rendered {
  std::string text;
  std::vector<Tokenizer::Range> user;   // byte ranges of `text` that came from message contents, tool results and names
};

class ChatTemplate {
 public:
  static Result<std::shared_ptr<const ChatTemplate>> compile(std::string source, TemplateVars vars);
  virtual ~ChatTemplate() = default;
  // messages_json and tools_json: OpenAI-shaped arrays (tools may be ""); extra_json: an object of further variables or "".
  virtual Result<Rendered> render(std::string_view messages_json, std::string_view tools_json, std::string_view extra_json,
                                  bool add_generation_prompt) const = 0;
};

}  // namespace mi::text
