// Parsing without trust and without exceptions: nlohmann's iterative parser feeds a handler that bounds the depth and the
// number of values, finds duplicate keys and appends members directly. (ordered_json's own insertion searches the object
// for every key, which for a header of a million tensors takes hours.)
#include <algorithm>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "base/file.h"
#include "base/json.h"

namespace mi {
namespace {

// "[json.exception.parse_error.101] parse error at line 1, column 6: syntax error ..." -> "line 1, column 6: syntax error ...".
// The parser quotes the whole token it stopped at, which may be as long as the file.
std::string parser_message(const std::string& what) {
  constexpr size_t kLongest = 240;
  size_t at = what.find(" at ");
  at = at == std::string::npos ? what.find("] ") + 2 : at + 4;
  std::string message = what.substr(std::min(at, what.size()));
  if (message.size() > kLongest) message = message.substr(0, kLongest) + "...";
  return message;
}

class Builder final : public nlohmann::json_sax<Json> {
 public:
  // With `member`, the value of every top-level member is handed over and dropped instead of collected.
  Builder(const JsonLimits& limits, const JsonMember* member) : limits_(limits), member_(member) {}

  bool null() override { return count() && add(Json(nullptr)); }
  bool boolean(bool v) override { return count() && add(Json(v)); }
  bool number_integer(int64_t v) override { return count() && add(Json(v)); }
  bool number_unsigned(uint64_t v) override { return count() && add(Json(v)); }
  bool number_float(double v, const std::string&) override { return count() && add(Json(v)); }
  bool string(std::string& v) override { return count() && add(Json(std::move(v))); }
  bool binary(Json::binary_t&) override { return stop("binary data"); }
  bool start_object(size_t) override { return open(Json::object()); }
  bool start_array(size_t) override { return open(Json::array()); }
  bool key(std::string& k) override {
    if (member_ && open_.size() == 1 && !top_keys_.insert(k).second && limits_.refuse_duplicate_keys) return stop(twice(k));
    open_.back().key = std::move(k);
    return true;
  }
  bool end_object() override {
    Json object = std::move(open_.back().value);
    open_.pop_back();
    if (!settle_duplicates(object.get_ref<Json::object_t&>())) return false;
    return add(std::move(object));
  }
  bool end_array() override {
    Json array = std::move(open_.back().value);
    open_.pop_back();
    return add(std::move(array));
  }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& e) override {
    return stop("not valid JSON: " + parser_message(e.what()));
  }

  Json result;
  std::optional<Error> from_member;    // what the caller's function returned
  std::string problem;

 private:
  struct Open { Json value; std::string key; };

  static std::string twice(const std::string& k) { return fmt::format("the key '{}' occurs twice in one object", k.substr(0, 200)); }
  bool stop(std::string p) {
    problem = std::move(p);
    return false;
  }
  bool count() {
    return ++values_ <= limits_.max_values || stop(fmt::format("JSON of more than {} values", limits_.max_values));
  }
  bool open(Json empty) {
    if (int(open_.size()) >= limits_.max_depth) return stop(fmt::format("JSON nested more than {} deep", limits_.max_depth));
    if (member_ && open_.empty() && !empty.is_object()) return stop("expected an object");
    if (!count()) return false;
    open_.push_back({std::move(empty), {}});
    return true;
  }
  bool add(Json v) {
    if (open_.empty()) {
      if (member_ && !v.is_object()) return stop("expected an object");
      result = std::move(v);
      return true;
    }
    Open& o = open_.back();
    if (o.value.is_array()) {
      o.value.get_ref<Json::array_t&>().push_back(std::move(v));
    } else if (member_ && open_.size() == 1) {
      if (Status s = (*member_)(std::move(o.key), std::move(v)); !s.ok()) from_member = s.error();
      return !from_member;
    } else {
      o.value.get_ref<Json::object_t&>().emplace_back(std::move(o.key), std::move(v));
    }
    return true;
  }
  // Refused, or else the last value counts, as in Python. Sorting pointers keeps this fast for huge objects.
  bool settle_duplicates(Json::object_t& object) {
    std::vector<const std::string*> keys;
    keys.reserve(object.size());
    for (const auto& [key, value] : object) keys.push_back(&key);
    std::sort(keys.begin(), keys.end(), [](const std::string* a, const std::string* b) { return *a < *b; });
    const auto same = std::adjacent_find(keys.begin(), keys.end(), [](const std::string* a, const std::string* b) { return *a == *b; });
    if (same == keys.end()) return true;
    if (limits_.refuse_duplicate_keys) return stop(twice(**same));
    Json::object_t kept;
    std::unordered_map<std::string, size_t> at;
    for (auto& [key, value] : object) {
      const auto [it, fresh] = at.emplace(key, kept.size());
      if (fresh) kept.emplace_back(key, std::move(value));
      else (kept.begin() + std::ptrdiff_t(it->second))->second = std::move(value);
    }
    object = std::move(kept);
    return true;
  }

  const JsonLimits limits_;
  const JsonMember* member_;
  std::vector<Open> open_;
  size_t values_ = 0;
  std::unordered_set<std::string> top_keys_;
};

// The value lands in b->result.
Status run(std::string_view text, const std::string& what, const JsonLimits& limits, Builder* b) {
  if (text.size() > limits.max_bytes) return bad_input("{}: {} bytes of JSON, more than the limit of {}", what, text.size(), limits.max_bytes);
  bool ok = false;
  try {
    ok = Json::sax_parse(text.begin(), text.end(), b);
  } catch (const nlohmann::json::exception& e) {
    b->problem = parser_message(e.what());
  }
  if (b->from_member) return *b->from_member;
  if (!ok) return bad_input("{}: {}", what, b->problem);
  return {};
}

}  // namespace

Result<Json> parse_json(std::string_view text, const std::string& what, const JsonLimits& limits) {
  Builder b(limits, nullptr);
  MI_TRY_VOID(run(text, what, limits, &b));
  return std::move(b.result);
}

Status parse_json_members(std::string_view text, const std::string& what, const JsonLimits& limits, const JsonMember& member) {
  Builder b(limits, &member);
  return run(text, what, limits, &b);
}

Result<Json> read_json(const Path& p, const JsonLimits& limits) {
  MI_TRY(const std::string text, read_file(p, limits.max_bytes));
  return parse_json(text, p.string(), limits);
}

}  // namespace mi
