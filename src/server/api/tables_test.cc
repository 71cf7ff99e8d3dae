// The tables against the parsers: what /openapi.json says of a field is what happens to it.
#include "server/api/tables.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "server/anthropic/request.h"
#include "server/api/openapi.h"
#include "server/responses/request.h"

namespace mi::server {
namespace {

using testing::HasSubstr;

struct Body {
  const char* path;
  const char* smallest;  // a legal body
  std::optional<ApiError> (*parse)(const Json&);
};
const std::vector<Body>& bodies() {
  static const std::vector<Body> b = {
      {"/v1/chat/completions", R"({"model": "m", "messages": [{"role": "user", "content": "x"}]})",
       [](const Json& j) {
         ChatRequest r;
         return parse_chat(j, {}, &r);
       }},
      {"/v1/completions", R"({"model": "m", "prompt": "x"})",
       [](const Json& j) {
         CompletionRequest r;
         return parse_completion(j, {}, &r);
       }},
      {"/v1/responses", R"({"model": "m", "input": "x"})",
       [](const Json& j) {
         ChatRequest r;
         ResponseRequest told;
         return parse_response(j, {}, &r, &told);
       }},
      {"/v1/messages", R"({"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]})",
       [](const Json& j) {
         ChatRequest r;
         return parse_message(j, {}, &r);
       }},
      {"/v1/messages/count_tokens", R"({"model": "m", "messages": [{"role": "user", "content": "x"}]})",
       [](const Json& j) {
         ChatRequest r;
         return parse_count_tokens(j, &r);
       }},
      {"/v1/embeddings", R"({"model": "m", "input": "x"})",
       [](const Json& j) {
         EmbeddingRequest r;
         return parse_embedding(j, &r);
       }},
      {"/tokenize", R"({"prompt": "x"})",
       [](const Json& j) {
         TokenizeRequest r;
         return parse_tokenize(j, &r);
       }},
      {"/detokenize", R"({"tokens": [1]})",
       [](const Json& j) {
         DetokenizeRequest r;
         return parse_detokenize(j, &r);
       }},
      {"/apply-template", R"({"messages": [{"role": "user", "content": "x"}]})",
       [](const Json& j) {
         ChatRequest r;
         return parse_apply_template(j, &r);
       }},
  };
  return b;
}

// Does a value have the JSON type(s) that a schema names at its top?
bool type_fits(const Json& schema, const Json& value) {
  if (schema.contains("const")) return schema["const"] == value;
  if (schema.contains("enum")) {
    for (const Json& e : schema["enum"])
      if (e == value) return true;
    return false;
  }
  for (const char* key : {"anyOf", "oneOf"})
    if (schema.contains(key)) {
      for (const Json& e : schema[key])
        if (type_fits(e, value)) return true;
      return false;
    }
  if (!schema.contains("type")) return true;
  const Json types = schema["type"].is_array() ? schema["type"] : Json::array({schema["type"]});
  for (const Json& t : types) {
    if ((t == "null" && value.is_null()) || (t == "boolean" && value.is_boolean()) ||
        (t == "object" && value.is_object()) ||
        (t == "string" && value.is_string() && (value != "" || !schema.contains("minLength"))) ||
        (t == "integer" && value.is_number_integer()) || (t == "number" && value.is_number()) ||
        (t == "array" && value.is_array() && (!value.empty() || !schema.contains("minItems"))))
      return true;
  }
  return false;
}

TEST(Tables, EveryBodyIsTried) {
  std::set<std::string> tried, all;
  for (const Body& b : bodies()) tried.insert(b.path);
  for (const RouteSpec& r : routes())
    if (r.body) all.insert(r.path);
  EXPECT_EQ(tried, all);
}

int64_t characters(std::string_view s) {
  int64_t n = 0;
  for (size_t i = 0; i < s.size(); ++n) {
    const size_t bytes = utf8_bytes(s, i);
    EXPECT_GT(bytes, 0u) << "broken at " << i;
    i += std::max<size_t>(bytes, 1);
  }
  return n;
}

TEST(Tables, WhatARequestSpellsIsRepeatedShortened) {
  std::string name;
  for (int i = 0; i < 20000; ++i) name += "\u00fc";
  for (const Body& b : bodies()) {
    Json body = parse_json(b.smallest, "b").value();
    body[name] = 1;
    const auto e = b.parse(body);
    ASSERT_TRUE(e) << b.path;
    EXPECT_EQ(characters(*e->param), 64) << b.path;
    EXPECT_TRUE(e->param->ends_with("\u00fc…"));
    EXPECT_THAT(e->message, HasSubstr("unknown field '\u00fc"));
    EXPECT_LT(characters(e->message), 200) << b.path;
  }
  // Wherever else a name or a value gets into a message.
  const Json tool{{"type", "function"}, {"function", {{"name", name}}}};
  const std::pair<const char*, Json> cases[] = {
      {"/v1/chat/completions", {{"tools", {tool, tool}}}},
      {"/v1/chat/completions",
       {{"tools", {tool}}, {"tool_choice", {{"type", "function"}, {"function", {{"name", name + "x"}}}}}}},
      {"/v1/chat/completions", {{"logit_bias", {{name, 1}}}}},
      {"/v1/chat/completions", {{"messages", {{{"role", name}, {"content", "x"}}}}}},
      {"/v1/chat/completions", {{"messages", {{{"role", "user"}, {"content", {{{"type", name}}}}}}}}},
      {"/v1/chat/completions", {{"messages", {{{"role", "user"}, {"content", "x"}, {name, 1}}}}}},
      {"/v1/chat/completions", {{"stream", true}, {"stream_options", {{name, 1}}}}},
      {"/v1/chat/completions", {{"response_format", {{"type", name}}}}},
      {"/v1/messages", {{"messages", {{{"role", "user"}, {"content", "x"}, {name, 1}}}}}},
      {"/v1/messages", {{"messages", {{{"role", "user"}, {"content", {{{"type", name}}}}}}}}},
      {"/v1/messages", {{"output_config", {{name, 1}}}}},
      {"/v1/messages", {{"tool_choice", {{"type", "tool"}, {"name", name}}}}},
      {"/v1/responses", {{"input", {{{"type", name}}}}}},
      {"/v1/responses", {{"input", {{{"role", name}, {"content", "x"}}}}}},
      {"/v1/responses", {{"tool_choice", {{"type", "function"}, {"name", name}}}}},
  };
  for (const auto& [path, more] : cases)
    for (const Body& b : bodies()) {
      if (std::string_view(b.path) != path) continue;
      Json body = parse_json(b.smallest, "b").value();
      body.update(more);
      const auto e = b.parse(body);
      ASSERT_TRUE(e) << path << dump_json(more).substr(0, 100);
      EXPECT_LT(characters(e->message), 300) << e->message.substr(0, 300);
      EXPECT_LE(characters(e->param.value_or("")), 64);
    }
  EXPECT_EQ(
      characters(parse_json(error_json({400, name, "", name, {}}), "e").value()["error"]["message"].get<std::string>()),
      1000);
}

TEST(Tables, WhatRunsCanBeScheduled) {
  int runs = 0;
  for (const Body& b : bodies()) {
    Json body = parse_json(b.smallest, "b").value();
    body["priority"] = -3;
    body["cache_salt"] = "s";
    const auto e = b.parse(body);
    const std::string_view path = b.path;
    const bool text_only = path.ends_with("tokenize") || path.ends_with("template") || path.ends_with("count_tokens");
    EXPECT_EQ(!e, !text_only) << path << (e ? e->message : "");
    runs += !e;
  }
  EXPECT_EQ(runs, 5);
  ChatRequest message, response;
  ResponseRequest told;
  EmbeddingRequest embedding;
  const Json more{{"priority", 7}, {"cache_salt", "mine"}};
  Json body =
      parse_json(R"({"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]})", "b").value();
  body.update(more);
  ASSERT_FALSE(parse_message(body, {}, &message));
  body = parse_json(R"({"model": "m", "input": "x"})", "b").value();
  body.update(more);
  ASSERT_FALSE(parse_response(body, {}, &response, &told));
  ASSERT_FALSE(parse_embedding(body, &embedding));
  for (const Scheduling* s : {static_cast<Scheduling*>(&message), static_cast<Scheduling*>(&response),
                              static_cast<Scheduling*>(&embedding)}) {
    EXPECT_EQ(s->priority, 7);
    EXPECT_EQ(s->cache_salt, "mine");
  }
}

TEST(Tables, WhatTheSchemaForbidsIsRefusedByName) {
  const std::vector<Json> values = {"",   "no such word", true,           5,
                                    -3.5, Json::array(),  Json::object(), Json::array({Json::array({true})})};
  for (const Body& b : bodies()) {
    const Json smallest = parse_json(b.smallest, "b").value();
    ASSERT_FALSE(b.parse(smallest)) << b.path << b.parse(smallest)->message;
    const Json schema = schema_of(find_route(b.path)->body());
    EXPECT_EQ(schema["additionalProperties"], false);
    for (const FieldSpec& f : find_route(b.path)->body()) {
      const Json& property = schema["properties"][f.name];
      // null is absent.
      Json body = smallest;
      body[f.name] = nullptr;
      EXPECT_EQ(b.parse(body).has_value(), smallest.contains(f.name)) << b.path << " " << f.name << " null";
      if (f.use == FieldUse::kRequired) {
        body.erase(f.name);
        const auto e = b.parse(body);
        ASSERT_TRUE(e) << b.path << " without " << f.name;
        EXPECT_THAT(e->message, HasSubstr(f.name));
      }
      for (const Json& value : values) {
        body = smallest;
        body[f.name] = value;
        const auto e = b.parse(body);
        if (f.use == FieldUse::kIgnored) {
          EXPECT_FALSE(e) << b.path << " " << f.name << ": " << e->message;
        } else if (f.use == FieldUse::kRefused || !type_fits(property, value)) {
          ASSERT_TRUE(e) << b.path << " took " << f.name << " = " << value.dump();
          EXPECT_THAT(e->message + " " + e->param.value_or(""), HasSubstr(f.name)) << value.dump();
          EXPECT_EQ(e->status, 400);
        }
      }
    }
    Json body = smallest;
    body["no_such_field"] = 1;
    ASSERT_TRUE(b.parse(body)) << b.path;
    EXPECT_THAT(b.parse(body)->message, HasSubstr("no_such_field"));
  }
}

TEST(Tables, RangesAreWhatTheSchemaSays) {
  for (const Body& b : bodies())
    for (const FieldSpec& f : find_route(b.path)->body()) {
      if (f.type != FieldType::kInteger && f.type != FieldType::kNumber) continue;
      const Json property = schema_of(find_route(b.path)->body())["properties"][f.name];
      const auto tried = [&](Json value) {
        Json body = parse_json(b.smallest, "b").value();
        body[f.name] = std::move(value);
        return b.parse(body);
      };
      const auto blames = [&](const std::optional<ApiError>& e) {
        return e && e->param == f.name && e->message.find("must be between") != std::string::npos;
      };
      const Json low = property["minimum"];
      EXPECT_FALSE(blames(tried(low))) << b.path << " " << f.name;
      EXPECT_TRUE(
          blames(tried(low.get<double>() - 1 == int64_t(low.get<double>() - 1) ? Json(int64_t(low.get<double>() - 1))
                                                                               : Json(low.get<double>() - 1))))
          << b.path << " " << f.name;
      if (!property.contains("maximum")) continue;
      const Json high = property["maximum"];
      EXPECT_FALSE(blames(tried(high))) << b.path << " " << f.name;
      EXPECT_TRUE(blames(tried(int64_t(high.get<double>()) + 1))) << b.path << " " << f.name;
    }
}

TEST(Tables, WithinFieldsTheSchemaHoldsToo) {
  struct Case {
    const char *path, *field, *value, *blamed;
  };
  for (const Case& c : {
           Case{"/v1/messages", "tool_choice", R"({"type": "auto", "name": {}})", "tool_choice.name"},
           Case{"/v1/messages", "thinking", R"({"type": "enabled", "budget_tokens": "many"})",
                "thinking.budget_tokens"},
           Case{"/v1/chat/completions", "tools",
                R"([{"type": "function", "function": {"name": "f", "description": 5}}])",
                "tools[0].function.description"},
           Case{"/v1/chat/completions", "response_format",
                R"({"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}})",
                "response_format.json_schema.strict"},
           Case{"/v1/responses", "text", R"({"format": {"type": "json_object", "name": 5}})", "text"},
           Case{"/v1/responses", "tools", R"([{"type": "function", "name": "f", "strict": "yes"}])", "tools[0]"},
       })
    for (const Body& b : bodies()) {
      if (std::string_view(b.path) != c.path) continue;
      Json body = parse_json(b.smallest, "b").value();
      body[c.field] = parse_json(c.value, "v").value();
      const auto e = b.parse(body);
      ASSERT_TRUE(e) << c.blamed;
      EXPECT_THAT(e->message, HasSubstr(c.blamed));
      EXPECT_EQ(e->param, c.field);
    }
}

TEST(Tables, MismatchesSayWhere) {
  const auto mismatch = [](const char* schema, const char* value) {
    return schema_mismatch(parse_json(schema, "s").value(), parse_json(value, "v").value(), "x").value_or("fits");
  };
  const char* schema =
      R"({"type": "object", "required": ["a"], "additionalProperties": false, "properties": {"a": {"type": ["integer", "null"], "minimum": 2},
      "b": {"type": "array", "minItems": 1, "maxItems": 2, "items": {"anyOf": [{"enum": ["y", "z"]}, {"type": "number"}]}},
      "c": {"type": "object", "additionalProperties": {"type": "string", "minLength": 1}}}})";
  for (const char* good : {R"({"a": 2})", R"({"a": null, "b": ["y", 1.5], "c": {"k": "v"}})"})
    EXPECT_EQ(mismatch(schema, good), "fits");
  EXPECT_EQ(mismatch(schema, "[]"), "x must be of type object, not array");
  EXPECT_EQ(mismatch(schema, "{}"), "x.a is missing");
  EXPECT_EQ(mismatch(schema, R"({"a": 1})"), "x.a is out of range");
  EXPECT_EQ(mismatch(schema, R"({"a": 2.5})"), R"(x.a must be of type ["integer","null"], not number)");
  EXPECT_EQ(mismatch(schema, R"({"a": 2, "d": 1})"), "x.d is unknown");
  EXPECT_EQ(mismatch(schema, R"({"a": 2, "b": []})"), "x.b has too few entries");
  EXPECT_EQ(mismatch(schema, R"({"a": 2, "b": [1, 2, 3]})"), "x.b has too many entries");
  EXPECT_EQ(mismatch(schema, R"({"a": 2, "b": ["w"]})"), R"(x.b[0] must be one of ["y","z"])");
  EXPECT_EQ(mismatch(schema, R"({"a": 2, "c": {"k": ""}})"), "x.c.k is empty");
}

TEST(Tables, NamesAreUniqueAndRoutesFound) {
  for (const RouteSpec& r : routes()) {
    if (!r.body) continue;
    std::set<std::string> names;
    for (const FieldSpec& f : r.body()) EXPECT_TRUE(names.insert(f.name).second) << r.path << " " << f.name;
  }
  EXPECT_STREQ(find_route("/v1/models/abc")->path, "/v1/models/{model}");
  EXPECT_STREQ(find_route("/v1/models")->path, "/v1/models");
  for (const char* no : {"/v1/models/", "/v1/models/a/b", "/", "", "/v1", "/v1/chat/completions/", "/V1/models"})
    EXPECT_FALSE(find_route(no)) << no;
}

TEST(OpenApi, IsWholeAndRefersToWhatIsThere) {
  const Json doc = openapi("1.2.3", {"m"}, true);
  for (const RouteSpec& r : routes()) EXPECT_TRUE(doc["paths"].contains(r.path)) << r.path;
  // Every reference leads somewhere.
  size_t references = 0;
  const std::function<void(const Json&)> walk = [&](const Json& j) {
    if (j.is_object() && j.contains("$ref")) {
      ++references;
      const std::string name = j["$ref"].get<std::string>().substr(std::string("#/components/schemas/").size());
      EXPECT_TRUE(doc["components"]["schemas"].contains(name)) << name;
    }
    if (j.is_structured())
      for (const Json& e : j) walk(e);
  };
  walk(doc);
  EXPECT_GT(references, 20u);
  EXPECT_FALSE(openapi("1", {"m"}, false).contains("security"));
}

}  // namespace
}  // namespace mi::server
