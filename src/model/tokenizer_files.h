#pragma once
// The text side of a checkpoint, brought into the form of a MIR directory's tokenizer/ folder: tokenizer.json,
// tokenizer_config.json, generation_config.json as they are, and one chat_template.jinja, whichever of the three usual
// places it comes from. Each file may be absent.

#include <string>
#include <vector>

#include "base/file.h"
#include "base/result.h"

namespace mi::model {

struct TokenizerFiles {
  std::vector<std::pair<std::string, Path>> copies;  // name in tokenizer/, source
  std::vector<std::pair<std::string, std::string>> texts;  // name in tokenizer/, contents: files that no checkpoint has
  std::string chat_template;                         // "" = none
  bool has_tokenizer = false;
  std::vector<int64_t> eos_ids;  // generation_config.json's; empty = it says nothing
  std::vector<std::string> notes;
};

// Checks and reads; writes nothing.
Result<TokenizerFiles> read_tokenizer_files(const Path& checkpoint);
// Into out/tokenizer.
Status write_tokenizer_files(const TokenizerFiles& t, const Path& out);

}  // namespace mi::model
