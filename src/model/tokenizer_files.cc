#include "model/tokenizer_files.h"

#include "base/json.h"
#include "model/folder.h"

namespace mi::model {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxTemplate = size_t(4) << 20;

// A template, or a list of {name, template}: the one named default, or the only one.
Result<std::string> choose_template(const Json& v, const std::string& what, std::vector<std::string>* notes) {
  if (v.is_null()) return std::string();
  if (v.is_string()) return v.get<std::string>();
  if (!v.is_array()) return bad_input("{}: chat_template: expected a template or a list of named ones", what);
  std::string chosen, others;
  for (const Json& e : v) {
    MI_TRY(const std::string name, json_get<std::string>(e, "name", what + ": chat_template"));
    MI_TRY(const std::string text, json_get<std::string>(e, "template", what + ": chat_template"));
    if (name == "default" || v.size() == 1)
      chosen = text;
    else
      others += (others.empty() ? "" : ", ") + name;
  }
  if (chosen.empty() && !v.empty())
    return bad_input("{}: chat_template: none of the templates ({}) is named default", what, others);
  if (!others.empty()) notes->push_back(fmt::format("{}: the chat template 'default' is used, not {}", what, others));
  return chosen;
}

Status read_chat_template(const Path& dir, const Json& tokenizer_config, TokenizerFiles* t) {
  MI_TRY(t->chat_template,
         choose_template(tokenizer_config.contains("chat_template") ? tokenizer_config["chat_template"] : Json(),
                         "tokenizer_config.json", &t->notes));
  std::string file_template, file_name;
  if (is_in_folder(dir, "chat_template.jinja")) {
    MI_TRY(const Path p, file_in_folder(dir, "chat_template.jinja", "the folder"));
    MI_TRY(file_template, read_file(p, kMaxTemplate));
    file_name = "chat_template.jinja";
  } else if (is_in_folder(dir, "chat_template.json")) {
    MI_TRY(const Path p, file_in_folder(dir, "chat_template.json", "the folder"));
    MI_TRY(const Json j, read_json(p));
    MI_TRY(file_template, choose_template(j.is_object() && j.contains("chat_template") ? j["chat_template"] : Json(),
                                          "chat_template.json", &t->notes));
    file_name = "chat_template.json";
  }
  if (file_name.empty()) return {};
  if (!t->chat_template.empty() && t->chat_template != file_template)
    t->notes.push_back(fmt::format("{} is used; tokenizer_config.json holds another chat template", file_name));
  t->chat_template = std::move(file_template);
  return {};
}

Status read_generation(const Path& p, TokenizerFiles* t) {
  MI_TRY(const Json j, read_json(p));
  if (!j.is_object()) return bad_input("{}: expected an object", p.string());
  if (!j.contains("eos_token_id") || j["eos_token_id"].is_null()) return {};
  const Json eos = j["eos_token_id"];
  for (const Json& e : eos.is_array() ? eos : Json::array({eos})) {
    if (!e.is_number_integer()) return bad_input("{}: eos_token_id: expected a token id or a list of them", p.string());
    t->eos_ids.push_back(e.get<int64_t>());
  }
  return {};
}

}  // namespace

Result<TokenizerFiles> read_tokenizer_files(const Path& dir) {
  TokenizerFiles t;
  Json tokenizer_config = Json::object();
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}) {
    if (!is_in_folder(dir, name)) continue;
    MI_TRY(const Path p, file_in_folder(dir, name, "the folder"));
    t.copies.push_back({name, p});
    const std::string n = name;
    if (n == "tokenizer.json") t.has_tokenizer = true;
    if (n == "generation_config.json") MI_TRY_VOID(read_generation(p, &t));
    if (n == "tokenizer_config.json") {
      MI_TRY(tokenizer_config, read_json(p));
      if (!tokenizer_config.is_object()) return bad_input("{}: expected an object", p.string());
    }
  }
  MI_TRY_VOID(read_chat_template(dir, tokenizer_config, &t));
  if (!t.has_tokenizer) {
    const bool sentencepiece = is_in_folder(dir, "tokenizer.model");
    t.notes.push_back(fmt::format(
        "warning: {} holds no tokenizer.json{}: the model takes token ids only; commands that need text will say so",
        dir.string(), sentencepiece ? " (tokenizer.model has to be converted to it)" : ""));
  }
  return t;
}

Status write_tokenizer_files(const TokenizerFiles& t, const Path& out) {
  const Path to = out / "tokenizer";
  std::error_code ec;
  fs::create_directories(to, ec);
  if (ec) return fail(ErrorCode::kEnvironment, "{}: cannot be created: {}", to.string(), ec.message());
  for (const auto& [name, source] : t.copies) {
    MI_TRY(const std::string text, read_file(source));
    MI_TRY_VOID(write_file(to / name, text));
  }
  for (const auto& [name, text] : t.texts) MI_TRY_VOID(write_file(to / name, text));
  if (!t.chat_template.empty()) MI_TRY_VOID(write_file(to / "chat_template.jinja", t.chat_template));
  return {};
}

}  // namespace mi::model
