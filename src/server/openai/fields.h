#pragma once
// Typed reading of a request object. null counts as absent. The first fault is kept and names the field; at the end
// unknown fields are refused by name.

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "server/openai/error.h"

namespace mi::server {

class Fields {
 public:
  explicit Fields(const Json& object) : object_(object) {}

  // The raw value, nullptr when absent or null.
  const Json* get(const char* name) {
    known_.emplace_back(name);
    const auto it = object_.find(name);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  void accept(std::initializer_list<const char*> names) { known_.insert(known_.end(), names.begin(), names.end()); }

  std::optional<std::string> text(const char* name) {
    const Json* j = get(name);
    if (!j) return std::nullopt;
    if (!j->is_string()) return wrong<std::string>(name, "a string", *j);
    return j->get<std::string>();
  }
  std::optional<bool> boolean(const char* name) {
    const Json* j = get(name);
    if (!j) return std::nullopt;
    if (!j->is_boolean()) return wrong<bool>(name, "true or false", *j);
    return j->get<bool>();
  }
  std::optional<double> number(const char* name, double low, double high) {
    const Json* j = get(name);
    if (!j) return std::nullopt;
    if (!j->is_number()) return wrong<double>(name, "a number", *j);
    const double v = j->get<double>();
    if (!(v >= low && v <= high))
      return out_of_range<double>(name, fmt::format("{} is {}; it must be between {} and {}", name, v, low, high));
    return v;
  }
  std::optional<int64_t> integer(const char* name, int64_t low, int64_t high) {
    const Json* j = get(name);
    if (!j) return std::nullopt;
    if (!j->is_number_integer()) return wrong<int64_t>(name, "an integer", *j);
    const bool huge = j->is_number_unsigned() && j->get<uint64_t>() > uint64_t(INT64_MAX);
    const int64_t v = huge ? INT64_MAX : j->get<int64_t>();
    if (huge || v < low || v > high)
      return out_of_range<int64_t>(
          name, fmt::format("{} is {}; it must be between {} and {}", name, dump_json(*j), low, high));
    return v;
  }

  void fault(ApiError e) {
    if (!error_) error_ = std::move(e);
  }
  bool ok() const { return !error_; }
  // The first fault, or the first unknown field.
  std::optional<ApiError> finish() {
    for (const auto& [key, value] : object_.items()) {
      if (error_) break;
      bool found = false;
      for (const std::string& k : known_) found = found || k == key;
      if (found) continue;
      const std::string near = nearest_name(key, known_);
      fault(bad_field(key, fmt::format("unknown field '{}'{}", key.substr(0, 100),
                                       near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near))));
    }
    return error_;
  }

 private:
  template <typename T>
  std::optional<T> wrong(const char* name, const char* expected, const Json& found) {
    fault(bad_field(name, fmt::format("{} must be {}, not {}", name, expected, found.type_name())));
    return std::nullopt;
  }
  template <typename T>
  std::optional<T> out_of_range(const char* name, std::string message) {
    fault(bad_field(name, std::move(message)));
    return std::nullopt;
  }
  const Json& object_;
  std::vector<std::string> known_;
  std::optional<ApiError> error_;
};

}  // namespace mi::server
