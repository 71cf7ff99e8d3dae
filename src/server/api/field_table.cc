#include "server/api/field_table.h"

#include <map>
#include <mutex>

#include "base/check.h"
#include "base/utf8.h"

namespace mi::server {

FieldSpec text_field(const char* name, const char* about, FieldUse use) {
  return {name, use, FieldType::kText, 0, 0, nullptr, nullptr, about};
}
FieldSpec flag_field(const char* name, const char* about) {
  return {name, FieldUse::kUsed, FieldType::kBoolean, 0, 0, nullptr, nullptr, about};
}
FieldSpec integer_field(const char* name, double low, double high, const char* about) {
  return {name, FieldUse::kUsed, FieldType::kInteger, low, high, nullptr, nullptr, about};
}
FieldSpec number_field(const char* name, double low, double high, const char* about) {
  return {name, FieldUse::kUsed, FieldType::kNumber, low, high, nullptr, nullptr, about};
}
FieldSpec object_field(const char* name, const FieldTable& (*members)(), const char* about) {
  return {name, FieldUse::kUsed, FieldType::kObject, 0, 0, members, nullptr, about};
}
FieldSpec json_field(const char* name, const char* schema, const char* about, FieldUse use) {
  return {name, use, FieldType::kJson, 0, 0, nullptr, schema, about};
}
FieldSpec ignored_field(const char* name, const char* about) {
  return {name, FieldUse::kIgnored, FieldType::kJson, 0, 0, nullptr, "{}", about};
}
FieldSpec refused_field(const char* name, const char* about) {
  return {name, FieldUse::kRefused, FieldType::kJson, 0, 0, nullptr, R"({"type": "null"})", about};
}

FieldTable joined(std::initializer_list<FieldTable> tables) {
  FieldTable all;
  for (const FieldTable& t : tables) all.insert(all.end(), t.begin(), t.end());
  return all;
}

namespace {

// null counts as absent, so every optional field may be null.
Json or_null(Json schema, bool required) {
  if (required) return schema;
  if (schema.contains("type") && schema["type"].is_string()) {
    if (schema["type"] != "null") schema["type"] = Json::array({schema["type"], "null"});
    if (schema.contains("enum")) schema["enum"].push_back(nullptr);
    return schema;
  }
  if (schema.empty()) return schema;
  return {{"anyOf", Json::array({std::move(schema), {{"type", "null"}}})}};
}

Json value_schema(const FieldSpec& f) {
  switch (f.type) {
    case FieldType::kText:
      return {{"type", "string"}};
    case FieldType::kBoolean:
      return {{"type", "boolean"}};
    case FieldType::kInteger: {
      Json j{{"type", "integer"}, {"minimum", int64_t(f.low)}};
      if (f.high < kNoHigh) j["maximum"] = int64_t(f.high);
      return j;
    }
    case FieldType::kNumber:
      return {{"type", "number"}, {"minimum", f.low}, {"maximum", f.high}};
    case FieldType::kObject:
      return schema_of(f.members());
    case FieldType::kObjects:
      return {{"type", "array"}, {"items", schema_of(f.members())}};
    case FieldType::kJson: {
      auto parsed = parse_json(f.schema, f.name);
      MI_CHECK(parsed.ok(), "the schema of field {}: {}", f.name, parsed.error().message());
      return std::move(parsed).value();
    }
  }
  return Json::object();
}

}  // namespace

namespace {

const char* type_name(const Json& j) {
  if (j.is_number_integer()) return "integer";
  if (j.is_number()) return "number";
  return j.type_name();
}
bool has_type(const Json& j, const std::string& type) {
  const std::string found = type_name(j);
  return found == type || (found == "integer" && type == "number");
}

std::optional<std::string> object_mismatch(const Json& schema, const Json& value, const std::string& place) {
  if (schema.contains("required"))
    for (const Json& name : schema["required"])
      if (!value.contains(name.get<std::string>()))
        return fmt::format("{}.{} is missing", place, name.get<std::string>());
  static const Json none = Json::object();
  const Json& properties = schema.contains("properties") ? schema["properties"] : none;
  for (const auto& [key, member] : value.items()) {
    const std::string at = place + "." + shortened(key);
    if (properties.contains(key)) {
      if (auto e = schema_mismatch(properties[key], member, at)) return e;
    } else if (schema.contains("additionalProperties")) {
      const Json& more = schema["additionalProperties"];
      if (more.is_boolean()) return fmt::format("{} is unknown", at);
      if (auto e = schema_mismatch(more, member, at)) return e;
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> schema_mismatch(const Json& schema, const Json& value, const std::string& place) {
  if (schema.contains("anyOf")) {
    std::optional<std::string> first;
    for (const Json& option : schema["anyOf"]) {
      auto e = schema_mismatch(option, value, place);
      if (!e) return std::nullopt;
      if (!first) first = std::move(e);
    }
    return first;
  }
  const auto one_of = [&](const Json& list) {
    for (const Json& e : list)
      if (e == value) return true;
    return false;
  };
  if ((schema.contains("enum") && !one_of(schema["enum"])) || (schema.contains("const") && schema["const"] != value))
    return fmt::format("{} must be {}", place,
                       schema.contains("enum") ? "one of " + dump_json(schema["enum"]) : dump_json(schema["const"]));
  if (schema.contains("type")) {
    const Json& t = schema["type"];
    const Json types = t.is_array() ? t : Json::array({t});
    bool fits = false;
    for (const Json& one : types) fits = fits || has_type(value, one.get<std::string>());
    if (!fits)
      return fmt::format("{} must be of type {}, not {}", place, t.is_array() ? dump_json(t) : t.get<std::string>(),
                         type_name(value));
  }
  if (value.is_number() && ((schema.contains("minimum") && value < schema["minimum"]) ||
                            (schema.contains("maximum") && value > schema["maximum"])))
    return fmt::format("{} is out of range", place);
  if (value.is_string() && schema.contains("minLength") && value.get_ref<const std::string&>().empty())
    return fmt::format("{} is empty", place);
  if (value.is_array()) {
    if (schema.contains("minItems") && value.size() < schema["minItems"].get<size_t>())
      return fmt::format("{} has too few entries", place);
    if (schema.contains("maxItems") && value.size() > schema["maxItems"].get<size_t>())
      return fmt::format("{} has too many entries", place);
    if (schema.contains("items"))
      for (size_t i = 0; i < value.size(); ++i)
        if (auto e = schema_mismatch(schema["items"], value[i], fmt::format("{}[{}]", place, i))) return e;
  }
  if (value.is_object()) return object_mismatch(schema, value, place);
  return std::nullopt;
}

std::optional<std::string> field_mismatch(const FieldTable& table, size_t index, const Json& value) {
  static std::mutex mutex;
  static std::map<const FieldTable*, Json> made;
  const Json* properties;
  {
    std::lock_guard lock(mutex);
    Json& schema = made[&table];
    if (schema.is_null()) schema = schema_of(table);
    properties = &schema["properties"];
  }
  return schema_mismatch((*properties)[table[index].name], value, table[index].name);
}

Json schema_of(const FieldTable& table) {
  Json properties = Json::object(), required = Json::array();
  for (const FieldSpec& f : table) {
    Json schema = or_null(value_schema(f), f.use == FieldUse::kRequired);
    std::string about = f.about;
    if (f.use == FieldUse::kIgnored) about = "Ignored: " + about;
    if (f.use == FieldUse::kRefused) about = "Not supported: " + about;
    if (!about.empty()) schema["description"] = about;
    properties[f.name] = std::move(schema);
    if (f.use == FieldUse::kRequired) required.push_back(f.name);
  }
  Json j{{"type", "object"}, {"properties", std::move(properties)}};
  if (!required.empty()) j["required"] = std::move(required);
  j["additionalProperties"] = false;
  return j;
}

}  // namespace mi::server
