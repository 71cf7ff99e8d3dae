#include "server/api/openapi.h"

#include <algorithm>
#include <sstream>

#include "server/api/tables.h"

namespace mi::server {
namespace {

Json schema_ref(const std::string& name) { return {{"$ref", "#/components/schemas/" + name}}; }
Json content(const char* type, Json schema) { return {{type, {{"schema", std::move(schema)}}}}; }
Json answer(const std::string& about, Json body = nullptr) {
  Json j{{"description", about}};
  if (!body.is_null()) j["content"] = std::move(body);
  return j;
}

std::string body_name(const RouteSpec& r) {
  std::string name = r.id;
  name[0] = char(std::toupper(static_cast<unsigned char>(name[0])));
  return name + "_request";
}

Json operation(const RouteSpec& r, const std::string& method, const std::vector<std::string>& models, bool keys) {
  const bool head = method == "HEAD";
  const char* errors = r.dialect == Dialect::kAnthropic ? "AnthropicError" : "Error";
  Json o{{"operationId", head ? std::string(r.id) + "_head" : std::string(r.id)}, {"summary", r.about}};
  if (r.open && keys) o["security"] = Json::array();
  const std::string_view path = r.path;
  if (const size_t open = path.find('{'); open != std::string_view::npos)
    o["parameters"] = Json::array({{{"name", path.substr(open + 1, path.size() - open - 2)},
                                    {"in", "path"},
                                    {"required", true},
                                    {"schema", {{"type", "string"}, {"enum", models}}}}});
  Json good = r.answer ? content("application/json", schema_ref(r.answer)) : Json();
  if (!r.answer)
    good = path == "/metrics" ? content("text/plain", {{"type", "string"}})
                              : content("application/json", {{"type", "object"}});
  if (r.event) {
    // No type: some readers of this document take the schema as that of each event, others as that of the whole text.
    good["text/event-stream"] = {
        {"schema",
         {{"description",
           fmt::format("With stream: true, server-sent events; the data of each is a {}, given by x-event.",
                       r.event)}}}};
    good["text/event-stream"]["x-event"] = schema_ref(r.event);
  }
  Json& answers = o["responses"];
  answers["200"] = answer("The answer.", head ? Json() : std::move(good));
  const auto add_error = [&](const char* status, const std::string& about) {
    answers[status] = answer(about, head ? Json() : content("application/json", schema_ref(errors)));
  };
  if (path == "/health")
    answers["503"] =
        answer("The model makes no progress.", head ? Json() : content("application/json", schema_ref("Health")));
  if (path == "/ready")
    answers["503"] = answer("Not now.", head ? Json() : content("application/json", schema_ref("Ready")));
  if (!r.open && keys) add_error("401", "A valid key is needed.");
  if (path.find('{') != std::string_view::npos) add_error("404", "No such model.");
  if (r.body) {
    o["requestBody"] = {{"required", true}, {"content", content("application/json", schema_ref(body_name(r)))}};
    add_error("400", "The request is at fault; the message says what is wrong.");
    add_error("404", "No such model.");
    add_error("413", "The body is too large.");
    add_error("429", "Too many requests wait; Retry-After says when to come back.");
    add_error("500", "The server is at fault.");
    add_error("503", "The server is shutting down, or all its places are taken; Retry-After says when to come back.");
    add_error("504", "The answer took longer than the server allows.");
  }
  return o;
}

}  // namespace

Json openapi(const char* version, const std::vector<std::string>& models, bool keys) {
  Json doc{{"openapi", "3.1.0"},
           {"info",
            {{"title", "metainfer"},
             {"version", version},
             {"description",
              "Unknown fields are refused by name. A field that is marked as ignored is accepted whatever it holds, "
              "because it "
              "could not change the answer; one that is marked as not supported is refused."}}}};
  Json schemas = answer_schemas();
  for (const RouteSpec& r : routes()) {
    std::istringstream methods(r.methods);
    for (std::string m; methods >> m;) {
      std::string key = m;
      std::transform(key.begin(), key.end(), key.begin(), [](unsigned char c) { return char(std::tolower(c)); });
      doc["paths"][r.path][key] = operation(r, m, models, keys);
    }
    if (!r.body) continue;
    Json schema = schema_of(r.body());
    Json& model = schema["properties"]["model"];
    model["enum"] = models;
    if (model["type"].is_array()) model["enum"].push_back(nullptr);
    schemas[body_name(r)] = std::move(schema);
  }
  doc["components"]["schemas"] = std::move(schemas);
  if (keys) {
    doc["components"]["securitySchemes"] = {
        {"bearer", {{"type", "http"}, {"scheme", "bearer"}}},
        {"x-api-key", {{"type", "apiKey"}, {"in", "header"}, {"name", "x-api-key"}}}};
    doc["security"] = Json::array({{{"bearer", Json::array()}}, {{"x-api-key", Json::array()}}});
  }
  return doc;
}

}  // namespace mi::server
