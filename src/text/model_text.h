#pragma once
// The text side of a model as it lies in the tokenizer/ folder of a MIR or engine directory:
// tokenizer.json, chat_template.jinja, tokenizer_config.json, generation_config.json; each may be absent.

#include <filesystem>
#include <memory>

#include "base/json.h"
#include "base/result.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace mi::text {

struct ModelText {
  std::shared_ptr<const Tokenizer> tokenizer;   // null: the model was exported without tokenizer.json
  std::shared_ptr<const ChatTemplate> chat;     // null: no chat template
  std::string chat_source;                      // its source
  TemplateVars tokens;                          // what tokenizer_config.json calls the begin, end ... tokens; "" if absent
  Json generation;                              // generation_config.json, an empty object if absent
};

// A file that is there but cannot be used is an error; an absent one is not.
Result<ModelText> load_model_text(const std::filesystem::path& tokenizer_dir);

}  // namespace mi::text
