#pragma once
// config.json as resolved values. A recipe declares keys: a canonical name, the spellings that files use, a type and a
// default. A value is looked up when the recipe refers to it; it comes from one place, which is remembered. Two
// spellings, or the nested text config and the top level, that say different things are an error that names both; null
// counts as absent.

#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/json.h"
#include "base/result.h"

namespace mi::model {

enum class KeyType : uint8_t { kInt, kFloat, kBool, kString, kInts, kStrings, kAny };

struct KeySpec {
  std::vector<std::string> keys;  // paths: "num_experts", "sparse_attention_config.sparse_block_size"
  KeyType type = KeyType::kInt;
  bool has_default = false;
  Json fallback;             // null: the value may be absent; for kInt also an expression: "hidden / heads"
  int64_t min = 1;           // of kInt
  bool nested_wins = false;  // the nested text config's value is taken where the top level differs (token ids)
};
using KeySpecs = std::map<std::string, KeySpec>;

class Config {
 public:
  // path: of config.json, for messages. text_keys: names under which a wrapper model keeps its text config
  // ("text_config").
  static Result<Config> create(Json root, const std::string& path, KeySpecs specs,
                               const std::vector<std::string>& text_keys);

  // By canonical name; null where it is absent and may be.
  Result<Json> value(const std::string& name);
  // The file says it (no default was taken).
  Result<bool> is_given(const std::string& name);
  // Integers: names, numbers, + - * /, parentheses; division has to be exact.
  Result<int64_t> eval(const std::string& expression);
  // A raw path in the text config or at the top level; null when absent. The source ("text_config.rope_theta") goes to
  // *source.
  Result<Json> raw(const std::string& path, std::string* source = nullptr, bool nested_wins = false);

  struct Resolved {
    std::string name, value, source;
  };
  const std::vector<Resolved>& resolved() const { return resolved_; }
  void note(std::string name, std::string value, std::string source) {
    resolved_.push_back({std::move(name), std::move(value), std::move(source)});
  }
  // Keys of the text config; those that nothing looked up.
  std::vector<std::string> keys() const;
  std::vector<std::string> unread_keys() const;
  const std::string& path() const { return path_; }
  const Json& root() const { return root_; }
  // "config.json: num_experts_per_tok" with the spelling that the file uses, for messages.
  std::string spelled(const std::string& name) const;

 private:
  struct Found {
    Json value;
    std::string source;  // "" = absent
  };
  Result<Found> find(const std::string& name, const KeySpec& spec);
  const Json& text() const { return text_key_.empty() ? root_ : root_[text_key_]; }

  Json root_;
  std::string path_, text_key_;
  KeySpecs specs_;
  std::map<std::string, Json> cache_;
  std::map<std::string, std::string> source_;  // canonical -> source
  std::set<std::string> resolving_, read_;     // read_: first path component
  std::vector<Resolved> resolved_;
};

}  // namespace mi::model
