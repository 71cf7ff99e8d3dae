#include "base/json.h"

#include <algorithm>

namespace mi {
namespace {

const char* kind_of(const Json& j) {
  switch (j.type()) {
    case Json::value_t::null: return "null";
    case Json::value_t::boolean: return "a boolean";
    case Json::value_t::string: return "a string";
    case Json::value_t::array: return "a list";
    case Json::value_t::object: return "an object";
    case Json::value_t::number_float: return "a fractional number";
    case Json::value_t::number_unsigned: return j.get<uint64_t>() > uint64_t(INT64_MAX) ? "an integer that is too large" : "an integer";
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
  // A slip changes a small part: one letter of a short name, two of a longer one, a third of a long one.
  size_t least = (name.size() <= 4 ? 1 : std::max<size_t>(2, name.size() / 3)) + 1;
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
