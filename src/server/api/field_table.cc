#include "server/api/field_table.h"

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
