#include "tools/gguf/vocab.h"

#include <algorithm>
#include <map>

#include "model/gguf_arch.h"

namespace mi::tools::gguf {
namespace {

namespace fs = std::filesystem;

// ggml's token types.
constexpr int32_t kNormal = 1, kControl = 3, kUserDefined = 4, kUnused = 5;

using model::flag_of;
using model::parts_of;
using model::text_of;

// A merge is "a b" or [a, b]; a space inside a part is written as its byte-level stand-in.
Result<std::string> merge_of(const Json& m, const std::string& what) {
  if (m.is_string()) return m.get<std::string>();
  if (!m.is_array() || m.size() != 2 || !m[0].is_string() || !m[1].is_string())
    return bad_input("{}: a merge is no pair of tokens", what);
  std::string out;
  for (const Json& part : m) {
    if (!out.empty()) out += ' ';
    for (const char c : part.get<std::string>()) {
      if (c == ' ')
        out += "\u0120";
      else
        out += c;
    }
  }
  return out;
}

struct Vocabulary {
  std::vector<std::string> tokens;
  std::vector<int32_t> types;
  std::map<std::string, int64_t, std::less<>> added;  // text -> id
};

Result<Vocabulary> read_tokens(const Json& tokenizer, int64_t size, const std::string& what,
                               std::vector<std::string>* notes) {
  Vocabulary v;
  v.tokens.resize(size_t(size));
  v.types.assign(size_t(size), 0);
  const auto put = [&](const Json& id, const std::string& text, int32_t type) -> Status {
    if (!id.is_number_integer() || id.get<int64_t>() < 0)
      return bad_input("{}: the id of token '{}' is no number", what, text);
    const int64_t i = id.get<int64_t>();
    if (i >= size)
      return bad_input(
          "{}: token '{}' has id {}, but the model has {} embeddings; --no-tokenizer leaves the tokenizer out", what,
          text, i, size);
    v.tokens[size_t(i)] = text;
    v.types[size_t(i)] = type;
    return {};
  };
  for (const auto& [text, id] : tokenizer["model"]["vocab"].items()) MI_TRY_VOID(put(id, text, kNormal));
  bool strips = false;
  if (tokenizer.contains("added_tokens"))
    for (const Json& a : tokenizer["added_tokens"]) {
      const std::string text = text_of(a, "content");
      MI_TRY_VOID(put(a.contains("id") ? a["id"] : Json(), text, flag_of(a, "special") ? kControl : kUserDefined));
      v.added[text] = a["id"].get<int64_t>();
      strips = strips || flag_of(a, "lstrip") || flag_of(a, "rstrip") || flag_of(a, "single_word");
    }
  if (strips) notes->push_back("some added tokens swallow the spaces around them; GGUF cannot say so");
  int64_t unused = 0;
  for (size_t i = 0; i < v.tokens.size(); ++i) {
    if (v.types[i] != 0) continue;
    v.tokens[i] = fmt::format("[PAD{}]", i);
    v.types[i] = kUnused;
    ++unused;
  }
  if (unused > 0) notes->push_back(fmt::format("{} embeddings have no token; they are marked unused", unused));
  return v;
}

// A token that tokenizer_config.json names: "<s>", or {"content": "<s>"}.
std::string named_token(const Json& config, const char* key) {
  if (!config.is_object() || !config.contains(key)) return "";
  return config[key].is_string() ? config[key].get<std::string>() : text_of(config[key], "content");
}

// Does the post-processor put `token` before every text?
bool prepends(const Json& post, const std::string& token) {
  if (text_of(post, "type") == "Sequence" && post.contains("processors")) {
    for (const Json& p : post["processors"])
      if (prepends(p, token)) return true;
    return false;
  }
  if (text_of(post, "type") != "TemplateProcessing" || !post.contains("single") || post["single"].empty()) return false;
  const Json& first = post["single"][0];
  return first.contains("SpecialToken") && text_of(first["SpecialToken"], "id") == token;
}

void put_special(const Json& tokenizer, const Json& config, const ir::ModelInfo& info, const Vocabulary& v,
                 model::GgufKeys* keys, std::vector<std::string>* notes) {
  const auto id_of = [&](const char* key) -> int64_t {
    const auto it = v.added.find(named_token(config, key));
    return it == v.added.end() ? -1 : it->second;
  };
  const auto valid = [&](int64_t id) { return id >= 0 && id < int64_t(v.tokens.size()); };
  const int64_t bos = valid(info.bos_id) ? info.bos_id : id_of("bos_token");
  if (bos >= 0) keys->put("tokenizer.ggml.bos_token_id", uint32_t(bos));
  // Of several ends the tokenizer's own is the first.
  std::vector<int64_t> ends;
  const int64_t named = id_of("eos_token");
  if (std::find(info.eos_ids.begin(), info.eos_ids.end(), named) != info.eos_ids.end() || info.eos_ids.empty())
    ends.push_back(named);
  for (int64_t id : info.eos_ids)
    if (id != named) ends.push_back(id);
  std::erase_if(ends, [&](int64_t id) { return !valid(id); });
  if (!ends.empty()) keys->put("tokenizer.ggml.eos_token_id", uint32_t(ends[0]));
  if (ends.size() > 1) keys->put("tokenizer.ggml.eot_token_id", uint32_t(ends[1]));
  if (ends.size() > 2)
    notes->push_back(fmt::format("the model ends at {} tokens; GGUF names two of them", ends.size()));
  const int64_t pad = valid(info.pad_id) ? info.pad_id : id_of("pad_token");
  if (pad >= 0) keys->put("tokenizer.ggml.padding_token_id", uint32_t(pad));
  const bool says = config.is_object() && config.contains("add_bos_token") && config["add_bos_token"].is_boolean();
  const Json post = tokenizer.contains("post_processor") ? tokenizer["post_processor"] : Json();
  keys->put("tokenizer.ggml.add_bos_token",
            bos >= 0 && (says ? flag_of(config, "add_bos_token") : prepends(post, v.tokens[size_t(bos)])));
}

}  // namespace

Status put_vocab(const Path& dir, const ir::ModelInfo& info, const VocabOptions& o, model::GgufKeys* keys,
                 std::vector<std::string>* notes) {
  std::error_code ec;
  const Path file = dir / "tokenizer.json";
  if (o.leave_out || !fs::exists(file, ec)) {
    keys->put("tokenizer.ggml.model", "none");
    notes->push_back("without a tokenizer: the file takes token ids only");
    return {};
  }
  const std::string what = file.string();
  MI_TRY(const Json t, read_json(file));
  const Json empty = Json::object();
  const Json& bpe = t.is_object() && t.contains("model") ? t["model"] : empty;
  const std::string kind = text_of(bpe, "type");
  const std::vector<Json> parts = parts_of(t.is_object() && t.contains("pre_tokenizer") ? t["pre_tokenizer"] : Json());
  const bool byte_level = !parts.empty() && text_of(parts.back(), "type") == "ByteLevel";
  if (kind != "BPE" || flag_of(bpe, "byte_fallback") || !byte_level)
    return bad_input(
        "{}: the tokenizer is {}, and GGUF files are written with byte-level BPE only; --no-tokenizer makes a file "
        "that takes token ids",
        what,
        kind == "BPE"  ? "BPE, but not byte-level"
        : kind.empty() ? "of an unknown kind"
                       : kind);
  if (!bpe.contains("vocab") || !bpe["vocab"].is_object() || !bpe.contains("merges") || !bpe["merges"].is_array())
    return bad_input("{}: model.vocab or model.merges is missing", what);
  const std::string pre = !o.pre_tokenizer.empty()
                              ? o.pre_tokenizer
                              : model::pre_tokenizer_name(t["pre_tokenizer"], flag_of(bpe, "ignore_merges"));
  if (pre.empty())
    return bad_input(
        "{}: llama.cpp has no known name for this pre_tokenizer; give one with --pre-tokenizer (its "
        "tokenizer.ggml.pre), or --no-tokenizer",
        what);
  MI_TRY(const Vocabulary v, read_tokens(t, info.vocab, what, notes));
  std::vector<std::string> merges;
  for (const Json& m : bpe["merges"]) {
    MI_TRY(std::string text, merge_of(m, what));
    merges.push_back(std::move(text));
  }
  Json config = Json::object();
  if (fs::exists(dir / "tokenizer_config.json", ec)) {
    MI_TRY(config, read_json(dir / "tokenizer_config.json"));
  }
  keys->put("tokenizer.ggml.model", "gpt2");
  keys->put("tokenizer.ggml.pre", pre);
  keys->put("tokenizer.ggml.tokens", v.tokens);
  keys->put("tokenizer.ggml.token_type", v.types);
  keys->put("tokenizer.ggml.merges", merges);
  put_special(t, config, info, v, keys, notes);
  if (fs::exists(dir / "chat_template.jinja", ec)) {
    MI_TRY(const std::string text, read_file(dir / "chat_template.jinja", size_t(4) << 20));
    keys->put("tokenizer.chat_template", text);
  }
  return {};
}

}  // namespace mi::tools::gguf
