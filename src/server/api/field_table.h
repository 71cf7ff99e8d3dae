#pragma once
// The fields that a request may have, as data. The parser reads through these tables (openai/fields.h) and
// /openapi.json is printed from them, so that what is documented is what is checked.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"

namespace mi::server {

enum class FieldUse : uint8_t {
  kUsed,
  kRequired,
  kIgnored,  // accepted whatever it holds: it could not change the answer here
  kRefused,  // known, and not supported: any value but null is an error, with `about` as its reason
};
enum class FieldType : uint8_t { kText, kBoolean, kInteger, kNumber, kObject, kObjects, kJson };

struct FieldSpec {
  const char* name;
  FieldUse use;
  FieldType type;
  double low = 0, high = 0;                              // kInteger, kNumber: the range, ends included
  const std::vector<FieldSpec>& (*members)() = nullptr;  // kObject; kObjects: of each object in the list
  const char* schema = nullptr;                          // kJson: JSON schema of what the parser checks itself
  const char* about = "";                                // one sentence for the documentation
};
using FieldTable = std::vector<FieldSpec>;

inline constexpr double kNoHigh = 9.3e18;  // of an integer: only the type is a limit

// Shorthands, so that a table reads like a table.
FieldSpec text_field(const char* name, const char* about, FieldUse use = FieldUse::kUsed);
FieldSpec flag_field(const char* name, const char* about);
FieldSpec integer_field(const char* name, double low, double high, const char* about);
FieldSpec number_field(const char* name, double low, double high, const char* about);
FieldSpec object_field(const char* name, const FieldTable& (*members)(), const char* about);
FieldSpec json_field(const char* name, const char* schema, const char* about, FieldUse use = FieldUse::kUsed);
FieldSpec ignored_field(const char* name, const char* about);
FieldSpec refused_field(const char* name, const char* about);
FieldTable joined(std::initializer_list<FieldTable> tables);

// Where a value is not what a schema of these tables says, in one sentence that begins with the place; nothing if it
// is. Knows the keywords that the tables use.
std::optional<std::string> schema_mismatch(const Json& schema, const Json& value, const std::string& place);
// The same for field `index` of a table. Tables are static: their schemas are made once.
std::optional<std::string> field_mismatch(const FieldTable& table, size_t index, const Json& value);

// JSON schema of an object with these fields. Unknown fields are refused, so "additionalProperties" is false.
Json schema_of(const FieldTable& table);

}  // namespace mi::server
