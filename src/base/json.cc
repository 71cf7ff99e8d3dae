#include "base/json.h"

#include <algorithm>
#include <set>

#include "base/file.h"

namespace mi {
namespace {

// Deepest nesting outside strings; iterative, so that hostile depth costs nothing.
int nesting_depth(std::string_view text) {
  int depth = 0, deepest = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      else if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      deepest = std::max(deepest, ++depth);
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return deepest;
}

// "[json.exception.parse_error.101] parse error at line 1, column 6: syntax error ..." -> "line 1, column 6: syntax error ..."
std::string parser_message(const std::string& what) {
  const size_t at = what.find(" at ");
  return at == std::string::npos ? what : what.substr(at + 4);
}

const char* kind_of(const Json& j) {
  switch (j.type()) {
    case Json::value_t::null: return "null";
    case Json::value_t::boolean: return "a boolean";
    case Json::value_t::string: return "a string";
    case Json::value_t::array: return "a list";
    case Json::value_t::object: return "an object";
    case Json::value_t::number_float: return "a fractional number";
    default: return "an integer";
  }
}

bool read(const Json& j, bool* out) { if (!j.is_boolean()) return false; *out = j.get<bool>(); return true; }
bool read(const Json& j, int64_t* out) {
  if (j.is_number_unsigned()) {
    if (j.get<uint64_t>() > uint64_t(INT64_MAX)) return false;
  } else if (!j.is_number_integer()) {
    return false;
  }
  *out = j.get<int64_t>();
  return true;
}
bool read(const Json& j, double* out) { if (!j.is_number()) return false; *out = j.get<double>(); return true; }
bool read(const Json& j, std::string* out) { if (!j.is_string()) return false; *out = j.get<std::string>(); return true; }
template <typename T>
bool read(const Json& j, std::vector<T>* out) {
  if (!j.is_array()) return false;
  out->clear();
  for (const Json& e : j) {
    T v{};
    if (!read(e, &v)) return false;
    out->push_back(std::move(v));
  }
  return true;
}
const char* expected(const bool*) { return "true or false"; }
const char* expected(const int64_t*) { return "an integer"; }
const char* expected(const double*) { return "a number"; }
const char* expected(const std::string*) { return "a string"; }
const char* expected(const std::vector<int64_t>*) { return "a list of integers"; }
const char* expected(const std::vector<double>*) { return "a list of numbers"; }
const char* expected(const std::vector<std::string>*) { return "a list of strings"; }

// Optimal string alignment distance: insertions, deletions, substitutions, swaps of neighbours.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (size_t i = 1; i <= a.size(); ++i)
    for (size_t j = 1; j <= b.size(); ++j) {
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  return d[a.size()][b.size()];
}

}  // namespace

Result<Json> parse_json(std::string_view text, const std::string& what, const JsonLimits& limits) {
  if (text.size() > limits.max_bytes) return bad_input("{}: {} bytes of JSON, more than the limit of {}", what, text.size(), limits.max_bytes);
  if (const int depth = nesting_depth(text); depth > limits.max_depth)
    return bad_input("{}: JSON nested {} deep, more than the limit of {}", what, depth, limits.max_depth);
  std::vector<std::set<std::string>> keys;
  std::string duplicate;
  const auto callback = [&](int, Json::parse_event_t event, Json& value) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    else if (event == Json::parse_event_t::object_end) keys.pop_back();
    else if (event == Json::parse_event_t::key && !keys.back().insert(value.get_ref<const std::string&>()).second && duplicate.empty())
      duplicate = value.get<std::string>();
    return true;
  };
  try {
    Json j = limits.refuse_duplicate_keys ? Json::parse(text.begin(), text.end(), callback) : Json::parse(text.begin(), text.end());
    if (!duplicate.empty()) return bad_input("{}: the key '{}' occurs twice in one object", what, duplicate);
    return j;
  } catch (const nlohmann::json::exception& e) {
    return bad_input("{}: not valid JSON: {}", what, parser_message(e.what()));
  }
}

Result<Json> read_json(const Path& p, const JsonLimits& limits) {
  MI_TRY(const std::string text, read_file(p, limits.max_bytes));
  return parse_json(text, p.string(), limits);
}

std::string dump_json(const Json& j, int indent) { return j.dump(indent, ' ', false, Json::error_handler_t::replace); }

template <typename T>
Result<T> json_get(const Json& obj, const std::string& key, const std::string& what) {
  if (!obj.is_object()) return bad_input("{}: expected an object, found {}", what, kind_of(obj));
  if (!obj.contains(key)) return bad_input("{}: {} is missing", what, key);
  T v{};
  if (!read(obj[key], &v)) return bad_input("{}: {}: expected {}, found {}", what, key, expected(&v), kind_of(obj[key]));
  return v;
}
template <typename T>
Result<T> json_get_or(const Json& obj, const std::string& key, T fallback, const std::string& what) {
  if (obj.is_object() && (!obj.contains(key) || obj[key].is_null())) return fallback;
  return json_get<T>(obj, key, what);
}
#define MI_INSTANTIATE(T)                                                                  \
  template Result<T> json_get<T>(const Json&, const std::string&, const std::string&);     \
  template Result<T> json_get_or<T>(const Json&, const std::string&, T, const std::string&);
MI_INSTANTIATE(bool)
MI_INSTANTIATE(int64_t)
MI_INSTANTIATE(double)
MI_INSTANTIATE(std::string)
MI_INSTANTIATE(std::vector<int64_t>)
MI_INSTANTIATE(std::vector<double>)
MI_INSTANTIATE(std::vector<std::string>)

std::string nearest_name(std::string_view name, const std::vector<std::string>& known) {
  if (name.size() > 200) return {};
  std::string best;
  size_t least = std::max<size_t>(2, name.size() / 3) + 1;
  for (const std::string& k : known) {
    if (k.size() > 200) continue;
    const size_t d = edit_distance(name, k);
    if (d < least && d < std::max(name.size(), k.size())) { least = d; best = k; }
  }
  return best;
}

Status refuse_unknown_keys(const Json& obj, const std::vector<std::string>& known, const std::string& what) {
  if (!obj.is_object()) return bad_input("{}: expected an object, found {}", what, kind_of(obj));
  for (const auto& [key, value] : obj.items()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    const std::string near = nearest_name(key, known);
    return bad_input("{}: unknown key '{}'{}", what, key, near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near));
  }
  return {};
}

}  // namespace mi
