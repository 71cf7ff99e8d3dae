#include "tools/check_text.h"

#include "model/tokenizer_files.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace mi::tools {

namespace {

Status check(const Path& folder) {
  std::error_code ec;
  if (!std::filesystem::is_directory(folder, ec)) return {};
  MI_TRY(const model::TokenizerFiles files, model::read_tokenizer_files(folder));
  for (const auto& [name, source] : files.copies) {
    if (name != "tokenizer.json") continue;
    if (const auto t = text::Tokenizer::load(source); !t.ok()) return t.error();
  }
  if (files.chat_template.empty()) return {};
  if (const auto t = text::ChatTemplate::compile(files.chat_template, {}); !t.ok())
    return t.error().with_context(folder.string());
  return {};
}

}  // namespace

Status check_text(const Path& folder, const std::string& way_out) {
  const Status s = check(folder);
  if (s.ok() || s.error().code() != ErrorCode::kBadInput) return s;
  return bad_input("{}; {}", s.error().message(), way_out);
}

}  // namespace mi::tools
