#include "server/anthropic/request.h"

#include "server/openai/fields.h"

namespace mi::server {
namespace {

bool has_string(const Json& j, const char* key) { return j.contains(key) && j[key].is_string(); }

std::string type_of(const Json& block) {
  return block.is_object() && has_string(block, "type") ? block["type"].get<std::string>() : "";
}

// Text, or text blocks joined by line ends.
std::optional<ApiError> joined_text(const Json& content, const std::string& where, std::string* out) {
  if (content.is_string()) {
    *out = content.get<std::string>();
    return std::nullopt;
  }
  if (!content.is_array()) return bad_field(where, where + " must be a string or a list of blocks");
  bool first = true;
  for (const Json& block : content) {
    const std::string type = type_of(block);
    if (type != "text")
      return bad_field(where, type.empty()
                                  ? where + ": every block must be an object with a type"
                                  : fmt::format("{}: blocks of type '{}' are not supported here; this model reads text",
                                                where, shortened(type)));
    if (!has_string(block, "text")) return bad_field(where, where + ": a text block without its text");
    *out += (first ? "" : "\n") + block["text"].get<std::string>();
    first = false;
  }
  return std::nullopt;
}

// One message becomes one of the chat's, and one more for each tool result in it. Order is kept.
class MessageReader {
 public:
  MessageReader(const Json& message, std::string where, Json* out) : m_(message), where_(std::move(where)), out_(out) {}

  std::optional<ApiError> read() {
    if (!m_.is_object()) return bad_field(where_, where_ + " must be an object");
    for (const auto& [key, value] : m_.items())
      if (key != "role" && key != "content")
        return bad_field(where_, fmt::format("{}: unknown field '{}'", where_, shortened(key)));
    if (!has_string(m_, "role")) return bad_field(where_, where_ + ".role is missing");
    role_ = m_["role"].get<std::string>();
    if (role_ != "user" && role_ != "assistant" && role_ != "system")
      return bad_field(where_, fmt::format("{}.role '{}' is unknown; it may be user, assistant or system", where_,
                                           shortened(role_)));
    if (!m_.contains("content") || m_["content"].is_null()) return bad_field(where_, where_ + ".content is missing");
    const Json& content = m_["content"];
    if (content.is_string()) {
      out_->push_back({{"role", role_}, {"content", content}});
      return std::nullopt;
    }
    if (!content.is_array()) return bad_field(where_, where_ + ".content must be a string or a list of blocks");
    for (const Json& block : content)
      if (auto e = read_block(block)) return e;
    flush(content.empty());
    return std::nullopt;
  }

 private:
  std::optional<ApiError> read_block(const Json& b) {
    const std::string type = type_of(b);
    const auto bad = [&](const std::string& what) { return bad_field(where_, where_ + ".content: " + what); };
    if (type.empty()) return bad("every block must be an object with a type");
    if (type == "text") {
      if (!has_string(b, "text")) return bad("a text block without its text");
      text_ += (any_text_ ? "\n" : "") + b["text"].get<std::string>();
      any_text_ = true;
    } else if (type == "thinking" && role_ == "assistant") {
      if (!has_string(b, "thinking")) return bad("a thinking block without its thinking");
      thinking_ += b["thinking"].get<std::string>();
    } else if (type == "redacted_thinking" && role_ == "assistant") {
      // Not made here, and not readable.
    } else if (type == "tool_use" && role_ == "assistant") {
      if (!has_string(b, "name") || !has_string(b, "id")) return bad("a tool_use block needs an id and a name");
      if (b.contains("input") && !b["input"].is_object()) return bad("the input of a tool_use block must be an object");
      calls_.push_back({{"id", b["id"]},
                        {"type", "function"},
                        {"function", {{"name", b["name"]}, {"arguments", b.value("input", Json::object())}}}});
    } else if (type == "tool_result" && role_ == "user") {
      if (!has_string(b, "tool_use_id")) return bad("a tool_result block without its tool_use_id");
      std::string text;
      if (b.contains("content") && !b["content"].is_null())
        if (auto e = joined_text(b["content"], where_ + ".content: the content of a tool_result", &text)) {
          e->param = where_;
          return e;
        }
      flush(false);
      out_->push_back({{"role", "tool"}, {"tool_call_id", b["tool_use_id"]}, {"content", std::move(text)}});
    } else {
      return bad(fmt::format("blocks of type '{}' are not supported in {} messages", shortened(type), role_));
    }
    return std::nullopt;
  }

  void flush(bool even_empty) {
    if (!any_text_ && calls_.empty() && thinking_.empty() && !even_empty) return;
    Json m{{"role", role_}, {"content", std::exchange(text_, {})}};
    if (!thinking_.empty()) m["reasoning_content"] = std::exchange(thinking_, {});
    if (!calls_.empty()) m["tool_calls"] = std::exchange(calls_, Json::array());
    any_text_ = false;
    out_->push_back(std::move(m));
  }

  const Json& m_;
  const std::string where_;
  Json* out_;
  std::string role_, text_, thinking_;
  bool any_text_ = false;
  Json calls_ = Json::array();
};

std::optional<ApiError> read_messages(const Json* system, const Json& messages, ChatRequest* out) {
  Json chat = Json::array();
  if (system) {
    std::string text;
    if (auto e = joined_text(*system, "system", &text)) return e;
    if (!text.empty()) chat.push_back({{"role", "system"}, {"content", std::move(text)}});
  }
  if (!messages.is_array()) return bad_field("messages", "messages must be a list");
  if (messages.empty()) return bad_field("messages", "messages is empty");
  for (size_t i = 0; i < messages.size(); ++i)
    if (auto e = MessageReader(messages[i], fmt::format("messages[{}]", i), &chat).read()) return e;
  if (chat.empty()) return bad_field("messages", "messages holds nothing");
  return set_messages(chat, out);
}

std::optional<ApiError> read_message_tools(const Json& tools, ChatRequest* out) {
  if (!tools.is_array()) return bad_field("tools", "tools must be a list");
  Json list = Json::array();
  for (size_t i = 0; i < tools.size(); ++i) {
    const Json& t = tools[i];
    const std::string where = fmt::format("tools[{}]", i);
    if (!t.is_object()) return bad_field("tools", where + " must be an object");
    if (t.contains("type") && !t["type"].is_null() && t["type"] != "custom")
      return bad_field("tools", where + ": only tools that the client runs are supported (type custom, or none)");
    Json f = Json::object();
    for (const auto& [from, to] : {std::pair{"name", "name"}, std::pair{"description", "description"},
                                   std::pair{"input_schema", "parameters"}, std::pair{"strict", "strict"}})
      if (t.contains(from)) f[to] = t[from];
    list.push_back({{"type", "function"}, {"function", std::move(f)}});
  }
  auto e = set_tools(list, "tools", out);
  return e;
}

std::optional<ApiError> read_message_choice(const Json& choice, ChatRequest* out) {
  const std::string type = type_of(choice);
  if (type == "none") {
    out->tool_choice = ToolChoice::kNone;
  } else if (type == "any" && !out->tools.empty()) {
    out->tool_choice = ToolChoice::kRequired;
  } else if (type == "tool") {
    if (!has_string(choice, "name")) return bad_field("tool_choice", "tool_choice of type tool needs a name");
    out->tool_choice = ToolChoice::kNamed;
    out->tool_name = choice["name"].get<std::string>();
    bool found = false;
    for (const Tool& t : out->tools) found = found || t.name == out->tool_name;
    if (!found)
      return bad_field("tool_choice", fmt::format("tool_choice names '{}', which is not among the tools",
                                                  shortened(out->tool_name)));
  } else if (type == "any") {
    return bad_field("tool_choice", "tool_choice is any, but there are no tools");
  } else if (type != "auto") {
    return bad_field("tool_choice", "tool_choice must be an object of type auto, any, tool or none");
  }
  if (choice.contains("disable_parallel_tool_use")) {
    if (!choice["disable_parallel_tool_use"].is_boolean())
      return bad_field("tool_choice", "disable_parallel_tool_use must be true or false");
    out->parallel_tool_calls = !choice["disable_parallel_tool_use"].get<bool>();
  }
  return std::nullopt;
}

std::optional<ApiError> read_output(const Json& config, ChatRequest* out) {
  if (!config.is_object()) return bad_field("output_config", "output_config must be an object");
  for (const auto& [key, value] : config.items())
    if (key != "effort" && key != "format")
      return bad_field("output_config", fmt::format("output_config: unknown field '{}'", shortened(key)));
  if (config.contains("effort") && !config["effort"].is_null())
    if (auto e = set_effort(config["effort"], "output_config", out)) return e;
  if (!config.contains("format") || config["format"].is_null()) return std::nullopt;
  const Json& format = config["format"];
  if (type_of(format) != "json_schema" || !format.contains("schema") || !format["schema"].is_object())
    return bad_field("output_config", "output_config.format must be of type json_schema and have a schema");
  out->format = AnswerFormat::kJsonSchema;
  out->schema = format["schema"];
  return std::nullopt;
}

void read_input(Fields& f, ChatRequest* out) {
  out->model = f.text("model").value_or("");
  const Json *system = f.get("system"), *messages = f.get("messages"), *tools = f.get("tools"),
             *choice = f.get("tool_choice"), *thinking = f.get("thinking"), *output = f.get("output_config");
  const auto check = [&](std::optional<ApiError> e) {
    if (e) f.fault(std::move(*e));
  };
  if (messages) check(read_messages(system, *messages, out));
  if (tools) check(read_message_tools(*tools, out));
  out->tool_choice = out->tools.empty() ? ToolChoice::kNone : ToolChoice::kAuto;
  if (choice) check(read_message_choice(*choice, out));
  if (thinking) {
    const std::string type = type_of(*thinking);
    if (type != "enabled" && type != "disabled" && type != "adaptive")
      return f.fault(bad_field("thinking", "thinking must be an object of type enabled, disabled or adaptive"));
    out->template_kwargs = {
        {"enable_thinking", type != "disabled"}, {"thinking", type != "disabled"}, {"thinking_mode", type}};
  }
  if (output) check(read_output(*output, out));
  if (f.ok()) check(check_chat(out));
}

}  // namespace

std::optional<ApiError> parse_message(const Json& body, const SamplingDefaults& d, ChatRequest* out) {
  if (!body.is_object()) return ApiError{400, "the body must be a JSON object", "invalid_request_error", {}, {}};
  Fields f(body, anthropic_message_fields());
  read_input(f, out);
  out->max_tokens = f.integer("max_tokens").value_or(-1);
  runtime::SamplingParams& s = out->sampling;
  s.temperature = f.number("temperature").value_or(d.temperature);
  s.top_p = f.number("top_p").value_or(d.top_p);
  s.top_k = f.integer("top_k").value_or(d.top_k);
  s.min_p = d.min_p;
  s.repetition_penalty = d.repetition_penalty;
  out->stream = f.boolean("stream").value_or(false);
  read_scheduling(f, out);
  if (const Json* j = f.get("stop_sequences")) {
    if (!j->is_array()) f.fault(bad_field("stop_sequences", "stop_sequences must be a list of strings"));
    if (j->is_array() && j->size() > kMaxStops)
      f.fault(bad_field("stop_sequences",
                        fmt::format("stop_sequences has {} entries; {} are the most", j->size(), kMaxStops)));
    for (const Json& stop : j->is_array() ? *j : Json::array()) {
      if (!stop.is_string() || stop.get_ref<const std::string&>().empty())
        f.fault(bad_field("stop_sequences", "stop_sequences must be a list of strings that are not empty"));
      else
        out->stop.push_back(stop.get<std::string>());
    }
  }
  return f.finish();
}

std::optional<ApiError> parse_count_tokens(const Json& body, ChatRequest* out) {
  if (!body.is_object()) return ApiError{400, "the body must be a JSON object", "invalid_request_error", {}, {}};
  Fields f(body, count_tokens_fields());
  read_input(f, out);
  return f.finish();
}

std::string anthropic_error_json(const ApiError& e) {
  const char* type = "api_error";
  switch (e.status) {
    case 400:
    case 405:
      type = "invalid_request_error";
      break;
    case 401:
      type = "authentication_error";
      break;
    case 403:
      type = "permission_error";
      break;
    case 404:
      type = "not_found_error";
      break;
    case 413:
      type = "request_too_large";
      break;
    case 429:
      type = "rate_limit_error";
      break;
    case 503:
      type = "overloaded_error";
      break;
    case 504:
      type = "timeout_error";
      break;
    default:
      break;
  }
  return dump_json(Json{{"type", "error"}, {"error", {{"type", type}, {"message", sent_message(e)}}}});
}

}  // namespace mi::server
