#pragma once
// nlohmann::json with the manners that outside input needs: bounded size, depth and count, line and column in errors, no
// exceptions, duplicate keys refused where asked, unknown keys named with the nearest known one.

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace mi {

using Json = nlohmann::ordered_json;   // keeps the order of keys

struct JsonLimits {
  size_t max_bytes = size_t(512) << 20;
  int max_depth = 128;
  size_t max_values = SIZE_MAX;         // of the whole text: a value of two bytes takes up to a hundred in memory
  bool refuse_duplicate_keys = true;    // false: the last one counts
};
// `what` names the source in errors: "config.json".
Result<Json> parse_json(std::string_view text, const std::string& what, const JsonLimits& limits = {});
// Calls `member` for each member of the top-level object, in order, and keeps none: for objects of a million members.
using JsonMember = std::function<Status(std::string key, Json value)>;
Status parse_json_members(std::string_view text, const std::string& what, const JsonLimits& limits, const JsonMember& member);
Result<Json> read_json(const std::filesystem::path& p, const JsonLimits& limits = {});
// dump() that never throws: invalid UTF-8 is replaced by U+FFFD.
std::string dump_json(const Json& j, int indent = -1);

// Typed access; errors say "what: key: expected an integer, found a string".
template <typename T> Result<T> json_get(const Json& obj, const std::string& key, const std::string& what);
// Same with a default for a missing or null key.
template <typename T> Result<T> json_get_or(const Json& obj, const std::string& key, T fallback, const std::string& what);
// Instantiated for bool, int64_t, double, std::string, std::vector<int64_t>, std::vector<double>, std::vector<std::string>.

// The nearest of `known` by edit distance when near enough to be a slip, else "".
std::string nearest_name(std::string_view name, const std::vector<std::string>& known);
// "unknown key 'alhpa' (did you mean 'alpha'?)" for the first key of obj not in known.
Status refuse_unknown_keys(const Json& obj, const std::vector<std::string>& known, const std::string& what);

}  // namespace mi
