#include "server/responses/request.h"

#include "server/openai/fields.h"

namespace mi::server {
namespace {

bool has_text(const Json& j, const char* key) { return j.contains(key) && j[key].is_string(); }

// Text parts become the chat's.
std::optional<ApiError> read_content(const Json& content, const std::string& where, Json* out) {
  if (content.is_string()) {
    *out = content;
    return std::nullopt;
  }
  if (!content.is_array()) return bad_field("input", where + ".content must be a string or a list of parts");
  *out = Json::array();
  for (const Json& part : content) {
    if (!part.is_object() || !has_text(part, "type"))
      return bad_field("input", where + ".content: every part must be an object with a type");
    const std::string type = part["type"].get<std::string>();
    const char* key = type == "refusal" ? "refusal" : "text";
    if (type != "input_text" && type != "output_text" && type != "text" && type != "refusal")
      return bad_field("input", fmt::format("{}.content: parts of type '{}' are not supported; this model reads text",
                                            where, shortened(type)));
    if (!has_text(part, key)) return bad_field("input", where + ".content: a text part without its text");
    out->push_back({{"type", "text"}, {"text", part[key]}});
  }
  return std::nullopt;
}

// What one assistant turn consists of (reasoning, text, calls) comes as items one after the other.
class ItemReader {
 public:
  explicit ItemReader(Json* messages) : messages_(messages) {}

  std::optional<ApiError> read(const Json& item, const std::string& where) {
    if (!item.is_object()) return bad_field("input", where + " must be an object");
    const std::string type = has_text(item, "type") ? item["type"].get<std::string>() : "message";
    if (type == "message") return read_message(item, where);
    if (type == "function_call") {
      if (!has_text(item, "name") || !has_text(item, "call_id") || !has_text(item, "arguments"))
        return bad_field("input", where + ": a function_call needs call_id, name and arguments");
      Json& m = assistant();
      if (!m.contains("tool_calls")) m["tool_calls"] = Json::array();
      m["tool_calls"].push_back({{"id", item["call_id"]},
                                 {"type", "function"},
                                 {"function", {{"name", item["name"]}, {"arguments", item["arguments"]}}}});
      return std::nullopt;
    }
    if (type == "function_call_output") {
      if (!has_text(item, "call_id") || !item.contains("output"))
        return bad_field("input", where + ": a function_call_output needs call_id and output");
      Json content;
      if (auto e = read_content(item["output"], where + ".output", &content)) return e;
      messages_->push_back({{"role", "tool"}, {"tool_call_id", item["call_id"]}, {"content", std::move(content)}});
      return std::nullopt;
    }
    if (type == "reasoning") {
      std::string text;
      if (item.contains("content") && item["content"].is_array())
        for (const Json& part : item["content"])
          if (part.is_object() && has_text(part, "text")) text += part["text"].get<std::string>();
      if (!text.empty()) assistant()["reasoning_content"] = std::move(text);
      return std::nullopt;
    }
    return bad_field("input", fmt::format("{}: items of type '{}' are not supported", where, shortened(type)));
  }

 private:
  std::optional<ApiError> read_message(const Json& item, const std::string& where) {
    if (!has_text(item, "role")) return bad_field("input", where + ".role is missing");
    const std::string role = item["role"].get<std::string>();
    if (role != "user" && role != "assistant" && role != "system" && role != "developer")
      return bad_field("input", fmt::format("{}.role '{}' is unknown; it may be user, assistant, system or developer",
                                            where, shortened(role)));
    if (!item.contains("content")) return bad_field("input", where + ".content is missing");
    Json content;
    if (auto e = read_content(item["content"], where, &content)) return e;
    if (role == "assistant" && !messages_->empty() && messages_->back()["role"] == role &&
        !messages_->back().contains("tool_calls") && messages_->back()["content"] == "")
      messages_->back()["content"] = std::move(content);
    else
      messages_->push_back({{"role", role}, {"content", std::move(content)}});
    return std::nullopt;
  }
  // The assistant message that further parts of its turn belong to.
  Json& assistant() {
    if (messages_->empty() || messages_->back()["role"] != "assistant")
      messages_->push_back({{"role", "assistant"}, {"content", ""}});
    return messages_->back();
  }
  Json* messages_;
};

std::optional<ApiError> read_input(const Json& input, const std::optional<std::string>& instructions,
                                   ChatRequest* out) {
  Json messages = Json::array();
  if (instructions && !instructions->empty()) messages.push_back({{"role", "system"}, {"content", *instructions}});
  if (input.is_string()) {
    messages.push_back({{"role", "user"}, {"content", input}});
  } else if (input.is_array()) {
    if (input.empty()) return bad_field("input", "input is empty");
    ItemReader reader(&messages);
    for (size_t i = 0; i < input.size(); ++i)
      if (auto e = reader.read(input[i], fmt::format("input[{}]", i))) return e;
    if (messages.empty()) return bad_field("input", "input holds no message");
  } else {
    return bad_field("input", "input must be a string or a list of items");
  }
  auto e = set_messages(messages, out);
  if (e) e->param = "input";
  return e;
}

std::optional<ApiError> read_tools(const Json& tools, ChatRequest* out) {
  if (!tools.is_array()) return bad_field("tools", "tools must be a list");
  Json list = Json::array();
  for (size_t i = 0; i < tools.size(); ++i) {
    const Json& t = tools[i];
    if (!t.is_object() || !has_text(t, "type"))
      return bad_field("tools", fmt::format("tools[{}] must be an object with a type", i));
    Json f = Json::object();
    for (const char* key : {"name", "description", "parameters", "strict"})
      if (t.contains(key) && !t[key].is_null()) f[key] = t[key];
    list.push_back({{"type", t["type"]}, {"function", std::move(f)}});
  }
  return set_tools(list, "tools", out);
}

std::optional<ApiError> read_choice(const Json& choice, ChatRequest* out) {
  if (choice == "none") {
    out->tool_choice = ToolChoice::kNone;
  } else if (choice == "required") {
    if (out->tools.empty()) return bad_field("tool_choice", "tool_choice is required, but there are no tools");
    out->tool_choice = ToolChoice::kRequired;
  } else if (choice.is_object() && choice.contains("type") && choice["type"] == "function" &&
             has_text(choice, "name")) {
    out->tool_choice = ToolChoice::kNamed;
    out->tool_name = choice["name"].get<std::string>();
    for (const Tool& t : out->tools)
      if (t.name == out->tool_name) return std::nullopt;
    return bad_field("tool_choice", fmt::format("tool_choice names '{}', which is not among the tools",
                                                shortened(out->tool_name)));
  } else if (choice != "auto") {
    return bad_field("tool_choice", "tool_choice must be none, auto, required, or name a function");
  }
  return std::nullopt;
}

std::optional<ApiError> read_format(const Json& format, ChatRequest* out) {
  if (!format.is_object() || !has_text(format, "type"))
    return bad_field("text", "text.format must be an object with a type");
  const std::string type = format["type"].get<std::string>();
  if (type == "text") return std::nullopt;
  if (type == "json_object") {
    out->format = AnswerFormat::kJsonObject;
    return std::nullopt;
  }
  if (type != "json_schema") return bad_field("text", "text.format.type must be text, json_object or json_schema");
  if (!format.contains("schema") || !format["schema"].is_object())
    return bad_field("text", "text.format.schema must be an object");
  out->format = AnswerFormat::kJsonSchema;
  out->schema = format["schema"];
  return std::nullopt;
}

}  // namespace

std::optional<ApiError> parse_response(const Json& body, const SamplingDefaults& d, ChatRequest* out,
                                       ResponseRequest* told) {
  if (!body.is_object()) return ApiError{400, "the body must be a JSON object", "invalid_request_error", {}, {}};
  Fields f(body, response_fields());
  const auto check = [&](std::optional<ApiError> e) {
    if (e) f.fault(std::move(*e));
  };
  const auto keep = [&](const char* name, Json* to) {
    const Json* j = f.get(name);
    if (j) *to = *j;
    return j;
  };
  out->model = f.text("model").value_or("");
  const auto instructions = f.text("instructions");
  if (instructions) told->instructions = *instructions;
  if (const Json* input = f.get("input")) check(read_input(*input, instructions, out));
  out->max_tokens = f.integer("max_output_tokens").value_or(-1);
  out->stream = f.boolean("stream").value_or(false);
  read_scheduling(f, out);
  runtime::SamplingParams& s = out->sampling;
  s.temperature = f.number("temperature").value_or(d.temperature);
  s.top_p = f.number("top_p").value_or(d.top_p);
  s.top_k = d.top_k;
  s.min_p = d.min_p;
  s.repetition_penalty = d.repetition_penalty;
  if (const Json* tools = keep("tools", &told->tools)) check(read_tools(*tools, out));
  out->tool_choice = out->tools.empty() ? ToolChoice::kNone : ToolChoice::kAuto;
  if (const Json* choice = keep("tool_choice", &told->tool_choice)) check(read_choice(*choice, out));
  if (out->tools.empty() && out->tool_choice == ToolChoice::kAuto) out->tool_choice = ToolChoice::kNone;
  out->parallel_tool_calls = f.boolean("parallel_tool_calls").value_or(true);
  f.object("text", [&](Fields& t) {
    if (const Json* format = t.get("format")) {
      told->text_format = *format;
      check(read_format(*format, out));
    }
  });
  f.object("reasoning", [&](Fields& r) {
    if (const Json* effort = r.get("effort")) {
      told->effort = *effort;
      check(set_effort(*effort, "reasoning", out));
    }
  });
  if (const Json* j = f.get("truncation"); j && *j != "disabled")
    f.fault(bad_field("truncation", "truncation may only be disabled: what does not fit is refused"));
  if (const Json* j = f.get("background"); j && *j != false)
    f.fault(bad_field("background", "background may only be false: the answer comes in the same exchange"));
  if (const Json* j = f.get("include")) {
    bool ok = j->is_array();
    for (const Json& e : ok ? *j : Json::array()) ok = ok && e == "reasoning.encrypted_content";
    if (!ok) f.fault(bad_field("include", "include may only hold reasoning.encrypted_content"));
  }
  if (const Json* j = keep("metadata", &told->metadata); j && !j->is_object())
    f.fault(bad_field("metadata", "metadata must be an object"));
  if (f.ok()) check(check_chat(out));
  return f.finish();
}

}  // namespace mi::server
