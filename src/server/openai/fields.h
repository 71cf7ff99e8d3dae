#pragma once
// Typed reading of a request object through its table. null counts as absent. The first fault is kept and names the
// field; at the end unknown fields are refused by name. A field that the table lacks cannot be read, and one that the
// table says is used must be: either is a bug (MI_CHECK), so tables stay true.

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/json.h"
#include "server/api/field_table.h"
#include "server/openai/error.h"

namespace mi::server {

class Fields {
 public:
  Fields(const Json& object, const FieldTable& table) : object_(object), table_(table), read_(table.size()) {
    for (const FieldSpec& f : table) {
      const Json* j = value(f.name);
      if (!j && f.use == FieldUse::kRequired && !error_) {
        fault(bad_field(f.name, fmt::format("{} is missing", f.name)));
        missing_ = true;
      }
      if (j && f.use == FieldUse::kRefused)
        fault(bad_field(f.name, fmt::format("{} is not supported: {}", f.name, f.about)));
    }
  }

  // The raw value, nullptr when absent or null.
  const Json* get(const char* name) {
    spec(name);
    return value(name);
  }
  std::optional<std::string> text(const char* name) {
    const FieldSpec& f = spec(name, FieldType::kText);
    const Json* j = value(name);
    if (!j) return std::nullopt;
    if (!j->is_string()) return wrong<std::string>(f, "a string", *j);
    return j->get<std::string>();
  }
  std::optional<bool> boolean(const char* name) {
    const FieldSpec& f = spec(name, FieldType::kBoolean);
    const Json* j = value(name);
    if (!j) return std::nullopt;
    if (!j->is_boolean()) return wrong<bool>(f, "true or false", *j);
    return j->get<bool>();
  }
  std::optional<double> number(const char* name) {
    const FieldSpec& f = spec(name, FieldType::kNumber);
    const Json* j = value(name);
    if (!j) return std::nullopt;
    if (!j->is_number()) return wrong<double>(f, "a number", *j);
    const double v = j->get<double>();
    if (v >= f.low && v <= f.high) return v;
    fault(bad_field(name, fmt::format("{} is {}; it must be between {} and {}", name, v, f.low, f.high)));
    return std::nullopt;
  }
  std::optional<int64_t> integer(const char* name) {
    const FieldSpec& f = spec(name, FieldType::kInteger);
    const Json* j = value(name);
    if (!j) return std::nullopt;
    if (!j->is_number_integer()) return wrong<int64_t>(f, "an integer", *j);
    const int64_t low = int64_t(f.low), high = f.high >= kNoHigh ? INT64_MAX : int64_t(f.high);
    const bool huge = j->is_number_unsigned() && j->get<uint64_t>() > uint64_t(INT64_MAX);
    const int64_t v = huge ? INT64_MAX : j->get<int64_t>();
    if (!huge && v >= low && v <= high) return v;
    fault(bad_field(name, fmt::format("{} is {}; it must be between {} and {}", name, dump_json(*j), low, high)));
    return std::nullopt;
  }
  // The members of an object, to be read through the table that `name` refers to; faults name "name.member".
  template <typename Read>
  void object(const char* name, Read read) {
    const FieldSpec& f = spec(name, FieldType::kObject);
    const Json* j = value(name);
    if (!j) return;
    if (!j->is_object()) {
      wrong<bool>(f, "an object", *j);
      return;
    }
    Fields inner(*j, f.members());
    read(inner);
    if (auto e = inner.finish()) {
      e->message = std::string(name) + ": " + e->message;
      e->param = name;
      fault(std::move(*e));
    }
  }

  void fault(ApiError e) {
    if (!error_) error_ = std::move(e);
  }
  bool ok() const { return !error_; }
  // The first fault, or the first unknown field.
  std::optional<ApiError> finish() {
    for (size_t i = 0; i < table_.size(); ++i)
      MI_CHECK(error_ || read_[i] || (table_[i].use != FieldUse::kUsed && table_[i].use != FieldUse::kRequired),
               "field {} is in its table, but nothing reads it", table_[i].name);
    for (const auto& [key, value] : object_.items()) {
      if (error_ && !missing_) break;
      bool found = false;
      std::vector<std::string> known;
      for (const FieldSpec& f : table_) {
        found = found || key == f.name;
        known.emplace_back(f.name);
      }
      if (found) continue;
      const std::string near = nearest_name(key, known);
      std::string message = fmt::format("unknown field '{}'{}", shortened(key),
                                        near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near));
      // What is missing may be there under a wrong name.
      if (missing_) message += "; " + error_->message;
      missing_ = false;
      error_ = bad_field(key, std::move(message));
    }
    // What the parser did not look at within a field must be as documented, too.
    for (size_t i = 0; i < table_.size() && !error_; ++i)
      if (const Json* j = value(table_[i].name))
        if (auto mismatch = field_mismatch(table_, i, *j)) fault(bad_field(table_[i].name, std::move(*mismatch)));
    return error_;
  }

 private:
  const Json* value(const char* name) const {
    const auto it = object_.find(name);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  const FieldSpec& spec(const char* name, std::optional<FieldType> type = {}) {
    for (size_t i = 0; i < table_.size(); ++i) {
      const FieldSpec& f = table_[i];
      if (std::string_view(f.name) != name) continue;
      MI_CHECK((f.use == FieldUse::kUsed || f.use == FieldUse::kRequired) && (!type || f.type == *type),
               "field {} is read otherwise than its table says", name);
      read_[i] = true;
      return f;
    }
    MI_CHECK(false, "field {} is read, but its table lacks it", name);
    return table_[0];
  }
  template <typename T>
  std::optional<T> wrong(const FieldSpec& f, const char* expected, const Json& found) {
    fault(bad_field(f.name, fmt::format("{} must be {}, not {}", f.name, expected, found.type_name())));
    return std::nullopt;
  }
  const Json& object_;
  const FieldTable& table_;
  std::vector<bool> read_;
  std::optional<ApiError> error_;
  bool missing_ = false;  // error_ says that a field is
};

struct Scheduling;
void read_scheduling(Fields& f, Scheduling* out);

}  // namespace mi::server
