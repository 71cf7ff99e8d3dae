#include "text/model_text.h"

#include "base/file.h"

namespace mi::text {
namespace {

// "bos_token": "<s>" or {"content": "<s>", ...} or null.
std::string token_text(const Json& config, const char* key) {
  if (!config.contains(key)) return {};
  const Json& v = config[key];
  if (v.is_string()) return v.get<std::string>();
  if (v.is_object() && v.contains("content") && v["content"].is_string()) return v["content"].get<std::string>();
  return {};
}

Result<Json> json_or_empty(const Path& p) {
  if (!std::filesystem::exists(p)) return Json::object();
  MI_TRY(Json j, read_json(p));
  if (!j.is_object()) return bad_input("{}: expected an object", p.string());
  return j;
}

Result<ModelText> read_text(const std::filesystem::path& dir) {
  ModelText t;
  if (const Path p = dir / "tokenizer.json"; std::filesystem::exists(p)) {
    MI_TRY(t.tokenizer, Tokenizer::load(p));
  }
  MI_TRY(t.generation, json_or_empty(dir / "generation_config.json"));
  MI_TRY(const Json config, json_or_empty(dir / "tokenizer_config.json"));
  t.tokens = {token_text(config, "bos_token"), token_text(config, "eos_token"), token_text(config, "pad_token"),
              token_text(config, "unk_token")};
  if (const Path p = dir / "chat_template.jinja"; std::filesystem::exists(p)) {
    MI_TRY(std::string source, read_file(p, size_t(4) << 20));
    t.chat_source = source;
    auto compiled = ChatTemplate::compile(std::move(source), t.tokens);
    if (!compiled.ok()) return compiled.error().with_context(p.string());
    t.chat = std::move(compiled).value();
  }
  return t;
}

}  // namespace

Result<ModelText> load_model_text(const std::filesystem::path& dir) {
  auto t = read_text(dir);
  if (t.ok() || t.error().code() != ErrorCode::kBadInput) return t;
  return bad_input("{}; make this folder again from an intact checkpoint (export, quantize, build)", t.error().message());
}

}  // namespace mi::text
