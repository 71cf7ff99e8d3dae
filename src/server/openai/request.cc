#include "server/openai/request.h"

#include <algorithm>
#include <charconv>

#include "server/openai/fields.h"

namespace mi::server {
namespace {

constexpr int kMaxDepth = 64;
constexpr size_t kMaxValues = 1000000;   // prompts of token ids have the most; a body of the densest JSON took fifty times its size

std::optional<ApiError> object_expected(const Json& body) {
  if (body.is_object()) return std::nullopt;
  ApiError e;
  e.message = "the body must be a JSON object";
  return e;
}

void read_stop(Fields& f, CommonRequest* out) {
  const Json* j = f.get("stop");
  if (!j) return;
  const auto add = [&](const Json& s) {
    if (!s.is_string()) return f.fault(bad_field("stop", "stop must be a string or a list of strings"));
    if (s.get_ref<const std::string&>().empty()) return f.fault(bad_field("stop", "a stop string is empty"));
    out->stop.push_back(s.get<std::string>());
  };
  if (j->is_array()) {
    if (j->size() > kMaxStops)
      return f.fault(bad_field("stop", fmt::format("stop has {} entries; {} are the most", j->size(), kMaxStops)));
    for (const Json& s : *j) add(s);
  } else {
    add(*j);
  }
}

void read_logit_bias(Fields& f, CommonRequest* out) {
  const Json* j = f.get("logit_bias");
  if (!j) return;
  if (!j->is_object()) return f.fault(bad_field("logit_bias", "logit_bias must be an object of token ids and numbers"));
  for (const auto& [key, value] : j->items()) {
    int32_t id = 0;
    const auto r = std::from_chars(key.data(), key.data() + key.size(), id);
    if (r.ec != std::errc() || r.ptr != key.data() + key.size())
      return f.fault(bad_field("logit_bias", fmt::format("logit_bias: '{}' is no token id", shortened(key))));
    if (!value.is_number())
      return f.fault(bad_field("logit_bias", fmt::format("logit_bias: the value of token {} must be a number", id)));
    const double v = value.get<double>();
    if (!(v >= -100 && v <= 100))
      return f.fault(
          bad_field("logit_bias",
                    fmt::format("logit_bias: the value of token {} is {}; it must be between -100 and 100", id, v)));
    out->sampling.logit_bias.emplace_back(id, float(v));
  }
}

void read_seed(Fields& f, CommonRequest* out) {
  const Json* j = f.get("seed");
  if (!j) return;
  if (!j->is_number_integer()) return f.fault(bad_field("seed", "seed must be an integer"));
  out->sampling.seed = j->is_number_unsigned() ? j->get<uint64_t>() : uint64_t(j->get<int64_t>());
}

std::optional<std::vector<int32_t>> token_ids(const Json& list) {
  std::vector<int32_t> ids;
  for (const Json& id : list) {
    if (!id.is_number_integer()) return std::nullopt;
    const bool huge = id.is_number_unsigned() && id.get<uint64_t>() > uint64_t(INT32_MAX);
    const int64_t v = huge ? -1 : id.get<int64_t>();
    if (v < 0 || v > INT32_MAX) return std::nullopt;
    ids.push_back(int32_t(v));
  }
  return ids;
}

void read_format(Fields& f, CommonRequest* out) {
  const Json* j = f.get("response_format");
  if (!j) return;
  const auto bad = [&](const std::string& message) { f.fault(bad_field("response_format", message)); };
  if (!j->is_object() || !j->contains("type") || !(*j)["type"].is_string())
    return bad("response_format must be an object with a type");
  const std::string type = (*j)["type"].get<std::string>();
  if (type == "text") return;
  if (type == "json_object") {
    out->format = AnswerFormat::kJsonObject;
    return;
  }
  for (const auto& [name, format] :
       {std::pair{"grammar", AnswerFormat::kLark}, std::pair{"regex", AnswerFormat::kRegex}}) {
    if (type != name) continue;
    if (!j->contains(name) || !(*j)[name].is_string())
      return bad(fmt::format("response_format.{} must be a string", name));
    out->format = format;
    out->grammar = (*j)[name].get<std::string>();
    return;
  }
  if (type != "json_schema")
    return bad("response_format.type must be text, json_object, json_schema, grammar or regex");
  if (!j->contains("json_schema") || !(*j)["json_schema"].is_object())
    return bad("response_format.json_schema is missing");
  const Json& s = (*j)["json_schema"];
  if (!s.contains("schema") || !s["schema"].is_object())
    return bad("response_format.json_schema.schema must be an object");
  out->format = AnswerFormat::kJsonSchema;
  out->schema = s["schema"];
}

// Fields that both endpoints have.
void read_common(Fields& f, const SamplingDefaults& d, CommonRequest* out) {
  out->model = f.text("model").value_or("");
  runtime::SamplingParams& s = out->sampling;
  s.temperature = f.number("temperature").value_or(d.temperature);
  s.top_p = f.number("top_p").value_or(d.top_p);
  s.min_p = f.number("min_p").value_or(d.min_p);
  s.top_k = f.integer("top_k").value_or(d.top_k);
  s.presence_penalty = f.number("presence_penalty").value_or(0);
  s.frequency_penalty = f.number("frequency_penalty").value_or(0);
  s.repetition_penalty = f.number("repetition_penalty").value_or(d.repetition_penalty);
  s.min_tokens = f.integer("min_tokens").value_or(0);
  s.ignore_eos = f.boolean("ignore_eos").value_or(false);
  out->skip_special_tokens = f.boolean("skip_special_tokens").value_or(true);
  out->n = f.integer("n").value_or(1);
  out->stream = f.boolean("stream").value_or(false);
  read_scheduling(f, out);
  if (const Json* j = f.get("stop_token_ids")) {
    const auto ids = j->is_array() ? token_ids(*j) : std::nullopt;
    if (ids)
      out->stop_token_ids = *ids;
    else
      f.fault(bad_field("stop_token_ids", "stop_token_ids must be a list of token ids"));
  }
  read_seed(f, out);
  read_stop(f, out);
  read_logit_bias(f, out);
  read_format(f, out);
  bool options = false;
  f.object("stream_options", [&](Fields& o) {
    options = true;
    out->include_usage = o.boolean("include_usage").value_or(false);
  });
  if (options && !out->stream) f.fault(bad_field("stream_options", "stream_options is only allowed with stream: true"));
}

// A message's content: a string, or text parts joined by line ends. null only where allowed.
std::optional<ApiError> content_of(const Json& message, const std::string& where, bool null_allowed, Json* out) {
  const auto it = message.find("content");
  if (it == message.end() || it->is_null()) {
    if (!null_allowed) return bad_field(where, where + ".content is missing");
    *out = nullptr;
    return std::nullopt;
  }
  if (it->is_string()) {
    *out = *it;
    return std::nullopt;
  }
  if (!it->is_array()) return bad_field(where, where + ".content must be a string or a list of parts");
  std::string text;
  bool first = true;
  for (const Json& part : *it) {
    if (!part.is_object() || !part.contains("type") || !part["type"].is_string())
      return bad_field(where, where + ".content: every part must be an object with a type");
    const std::string type = part["type"].get<std::string>();
    if (type != "text" && type != "refusal")
      return bad_field(where, fmt::format("{}.content: parts of type '{}' are not supported; this model reads text",
                                          where, shortened(type)));
    if (!part.contains(type) || !part[type].is_string())
      return bad_field(where, where + ".content: a text part without its text");
    text += (first ? "" : "\n") + part[type].get<std::string>();
    first = false;
  }
  *out = text;
  return std::nullopt;
}

// Templates print call arguments as JSON: the string that the API carries becomes the object that it stands for.
std::optional<ApiError> read_tool_calls(const Json& calls, const std::string& where, Json* out) {
  if (!calls.is_array()) return bad_field(where, where + ".tool_calls must be a list");
  *out = Json::array();
  for (const Json& c : calls) {
    if (!c.is_object() || !c.contains("function") || !c["function"].is_object() || !c["function"].contains("name") ||
        !c["function"]["name"].is_string())
      return bad_field(where, where + ".tool_calls: every entry must have a function with a name");
    Json call = c;
    Json arguments = Json::object();
    if (c["function"].contains("arguments") && !c["function"]["arguments"].is_null()) {
      const Json& a = c["function"]["arguments"];
      if (a.is_object()) {
        arguments = a;
      } else if (a.is_string()) {
        if (!a.get_ref<const std::string&>().empty()) {
          JsonLimits limits;
          limits.max_depth = kMaxDepth;
          limits.max_values = kMaxValues;
          limits.refuse_duplicate_keys = false;
          auto parsed = parse_json(a.get_ref<const std::string&>(), where + ".tool_calls: arguments", limits);
          if (!parsed.ok() || !parsed->is_object())
            return bad_field(where, where + ".tool_calls: arguments must be the text of a JSON object");
          arguments = std::move(parsed).value();
        }
      } else {
        return bad_field(where, where + ".tool_calls: arguments must be a string");
      }
    }
    call["function"]["arguments"] = std::move(arguments);
    out->push_back(std::move(call));
  }
  return std::nullopt;
}

std::optional<ApiError> read_message(const Json& m, size_t index, Json* out) {
  const std::string where = fmt::format("messages[{}]", index);
  if (!m.is_object()) return bad_field(where, where + " must be an object");
  Fields f(m, message_fields());
  const Json* role_value = f.get("role");
  std::optional<std::string> role;
  if (role_value && role_value->is_string())
    role = role_value->get<std::string>();
  else if (role_value)
    f.fault(bad_field("role", "role must be a string"));
  f.get("content");
  const auto name = f.text("name");
  const auto call_id = f.text("tool_call_id");
  auto reasoning = f.text("reasoning_content");
  if (const auto other = f.text("reasoning"); other && !reasoning) reasoning = other;
  const Json* calls = f.get("tool_calls");
  if (auto e = f.finish()) {
    e->param = where;
    e->message = where + ": " + e->message;
    return e;
  }
  if (!role) return bad_field(where, where + ".role is missing");
  *out = Json::object();
  // "developer" is what newer clients call the system role; templates know only the old name.
  (*out)["role"] = *role == "developer" ? "system" : *role;
  if (*role != "system" && *role != "developer" && *role != "user" && *role != "assistant" && *role != "tool")
    return bad_field(where, fmt::format("{}.role '{}' is unknown; it may be system, developer, user, assistant or tool",
                                        where, shortened(*role)));
  Json content;
  if (auto e = content_of(m, where, *role == "assistant", &content)) return e;
  (*out)["content"] = std::move(content);
  if (name) (*out)["name"] = *name;
  if (call_id) (*out)["tool_call_id"] = *call_id;
  if (reasoning && !reasoning->empty()) (*out)["reasoning_content"] = *reasoning;
  if (calls) {
    if (*role != "assistant") return bad_field(where, where + ": only assistant messages may carry tool_calls");
    Json parsed;
    if (auto e = read_tool_calls(*calls, where, &parsed)) return e;
    if (!parsed.empty()) (*out)["tool_calls"] = std::move(parsed);
  } else if (*role == "assistant" && (*out)["content"].is_null()) {
    (*out)["content"] = "";
  }
  return std::nullopt;
}

void read_messages(Fields& f, ChatRequest* out) {
  if (const Json* j = f.get("messages"))
    if (auto e = set_messages(*j, out)) f.fault(std::move(*e));
}

std::optional<ApiError> read_tool(const Json& t, const std::string& where, Tool* out) {
  if (!t.is_object() || !t.contains("type") || !t["type"].is_string())
    return bad_field("tools", where + " must be an object with a type");
  if (t["type"].get<std::string>() != "function")
    return bad_field("tools", where + ": only tools of type 'function' are supported");
  if (!t.contains("function") || !t["function"].is_object()) return bad_field("tools", where + ".function is missing");
  const Json& fn = t["function"];
  if (!fn.contains("name") || !fn["name"].is_string() || fn["name"].get_ref<const std::string&>().empty())
    return bad_field("tools", where + ".function.name is missing");
  out->name = fn["name"].get<std::string>();
  out->parameters = Json::object();
  if (fn.contains("parameters") && !fn["parameters"].is_null()) {
    if (!fn["parameters"].is_object())
      return bad_field("tools", where + ".function.parameters must be a JSON schema (an object)");
    out->parameters = fn["parameters"];
  }
  if (fn.contains("strict") && !fn["strict"].is_null()) {
    if (!fn["strict"].is_boolean()) return bad_field("tools", where + ".function.strict must be true or false");
    out->strict = fn["strict"].get<bool>();
  }
  return std::nullopt;
}

void read_tools(Fields& f, ChatRequest* out) {
  const Json* tools = f.get("tools");
  const Json* choice = f.get("tool_choice");
  out->parallel_tool_calls = f.boolean("parallel_tool_calls").value_or(true);
  if (tools)
    if (auto e = set_tools(*tools, "tools", out)) return f.fault(std::move(*e));
  out->tool_choice = out->tools.empty() ? ToolChoice::kNone : ToolChoice::kAuto;
  if (choice) {
    if (choice->is_string()) {
      const std::string c = choice->get<std::string>();
      if (c == "none")
        out->tool_choice = ToolChoice::kNone;
      else if (c == "auto")
        out->tool_choice = out->tools.empty() ? ToolChoice::kNone : ToolChoice::kAuto;
      else if (c == "required")
        out->tool_choice = ToolChoice::kRequired;
      else
        return f.fault(bad_field("tool_choice", "tool_choice must be none, auto, required, or name a function"));
    } else if (choice->is_object() && choice->contains("function") && (*choice)["function"].is_object() &&
               (*choice)["function"].contains("name") && (*choice)["function"]["name"].is_string()) {
      out->tool_choice = ToolChoice::kNamed;
      out->tool_name = (*choice)["function"]["name"].get<std::string>();
      if (std::none_of(out->tools.begin(), out->tools.end(), [&](const Tool& t) { return t.name == out->tool_name; }))
        return f.fault(bad_field("tool_choice", fmt::format("tool_choice names '{}', which is not among the tools",
                                                            shortened(out->tool_name))));
    } else {
      return f.fault(bad_field("tool_choice", "tool_choice must be none, auto, required, or name a function"));
    }
    if (out->tool_choice == ToolChoice::kRequired && out->tools.empty())
      return f.fault(bad_field("tool_choice", "tool_choice is required, but there are no tools"));
  }
}

// What the chat template gets beside messages and tools.
void read_template_input(Fields& f, ChatRequest* out) {
  if (const Json* k = f.get("chat_template_kwargs")) {
    if (!k->is_object())
      f.fault(bad_field("chat_template_kwargs", "chat_template_kwargs must be an object"));
    else
      out->template_kwargs = *k;
  }
  if (const Json* j = f.get("reasoning_effort")) {
    if (auto e = set_effort(*j, "reasoning_effort", out)) f.fault(std::move(*e));
  }
}

// Of routes that may leave it out: "" then.
std::string optional_model(Fields& f) {
  const auto model = f.text("model");
  if (model && model->empty()) f.fault(bad_field("model", "model is empty"));
  return model.value_or("");
}

using Prompts = std::vector<std::variant<std::string, std::vector<int32_t>>>;

void read_prompts(Fields& f, const char* name, Prompts* out) {
  const Json* j = f.get(name);
  if (!j) return;
  const auto bad = [&](const std::string& message) { f.fault(bad_field(name, message)); };
  const std::string forms =
      fmt::format("{} must be a string, a list of strings, a list of token ids, or a list of such lists", name);
  const auto add_ids = [&](const Json& list) {
    if (auto ids = token_ids(list)) return out->emplace_back(std::move(*ids)), true;
    return bad(fmt::format("{} holds something that is no token id", name)), false;
  };
  if (j->is_string()) {
    out->emplace_back(j->get<std::string>());
  } else if (j->is_array() && !j->empty() && (*j)[0].is_number()) {
    if (!add_ids(*j)) return;
  } else if (j->is_array()) {
    if (j->empty()) return bad(fmt::format("{} is empty", name));
    if (j->size() > kMaxPrompts)
      return bad(fmt::format("{} has {} entries; {} are the most", name, j->size(), kMaxPrompts));
    for (const Json& p : *j) {
      if (p.is_string())
        out->emplace_back(p.get<std::string>());
      else if (!p.is_array())
        return bad(forms);
      else if (!add_ids(p))
        return;
    }
  } else {
    return bad(forms);
  }
  for (const auto& p : *out)
    if (std::visit([](const auto& v) { return v.empty(); }, p))
      return bad(out->size() == 1 ? fmt::format("{} is empty", name) : fmt::format("an entry of {} is empty", name));
}

}  // namespace

void read_scheduling(Fields& f, Scheduling* out) {
  out->priority = f.integer("priority").value_or(0);
  out->cache_salt = f.text("cache_salt").value_or("");
}

SamplingDefaults sampling_defaults(const Json& g) {
  SamplingDefaults d;
  if (!g.is_object()) return d;
  const auto number = [&](const char* key, double fallback) {
    return g.contains(key) && g[key].is_number() ? g[key].get<double>() : fallback;
  };
  const bool greedy = g.contains("do_sample") && g["do_sample"].is_boolean() && !g["do_sample"].get<bool>();
  d.temperature = greedy ? 0.0 : number("temperature", 1.0);
  if (!greedy) {
    d.top_p = number("top_p", 1.0);
    d.top_k = int64_t(std::clamp<double>(number("top_k", 0), INT32_MIN, INT32_MAX));
    d.min_p = number("min_p", 0.0);
  }
  d.repetition_penalty = number("repetition_penalty", 1.0);
  return d;
}

std::variant<Json, ApiError> parse_body(const std::string& body) {
  JsonLimits limits;
  limits.max_depth = kMaxDepth;
  limits.max_values = kMaxValues;
  auto parsed = parse_json(body, "the body", limits);
  if (!parsed.ok()) {
    ApiError e;
    e.message = parsed.error().message();
    return e;
  }
  return std::move(parsed).value();
}

std::optional<ApiError> set_messages(const Json& messages, ChatRequest* out) {
  if (!messages.is_array()) return bad_field("messages", "messages must be a list");
  if (messages.empty()) return bad_field("messages", "messages is empty");
  out->messages = Json::array();
  for (size_t i = 0; i < messages.size(); ++i) {
    Json m;
    if (auto e = read_message(messages[i], i, &m)) return e;
    out->messages.push_back(std::move(m));
  }
  return std::nullopt;
}

std::optional<ApiError> set_tools(const Json& tools, const std::string& where, ChatRequest* out) {
  if (!tools.is_array()) return bad_field("tools", "tools must be a list");
  if (tools.size() > kMaxTools)
    return bad_field("tools", fmt::format("tools has {} entries; {} are the most", tools.size(), kMaxTools));
  for (size_t i = 0; i < tools.size(); ++i) {
    Tool t;
    if (auto e = read_tool(tools[i], fmt::format("{}[{}]", where, i), &t)) return e;
    for (const Tool& other : out->tools)
      if (other.name == t.name) return bad_field("tools", fmt::format("two tools are named '{}'", shortened(t.name)));
    out->tools.push_back(std::move(t));
  }
  out->tools_json = tools;
  return std::nullopt;
}

std::optional<ApiError> set_effort(const Json& effort, const char* param, ChatRequest* out) {
  const char* const known[] = {"none", "minimal", "low", "medium", "high", "xhigh", "max"};
  if (std::find(std::begin(known), std::end(known), effort) == std::end(known))
    return bad_field(param, fmt::format("{} must be none, minimal, low, medium, high, xhigh or max", param));
  Json& variables = out->template_kwargs;
  if (variables.is_null()) variables = Json::object();
  if (!variables.contains("reasoning_effort")) variables["reasoning_effort"] = effort;
  if (effort == "none" && !variables.contains("enable_thinking")) variables["enable_thinking"] = false;
  return std::nullopt;
}

std::optional<ApiError> check_chat(ChatRequest* out) {
  // "none": the model is not told of tools that it must not call.
  if (out->tool_choice == ToolChoice::kNone) out->tools_json = nullptr;
  if (out->format != AnswerFormat::kText &&
      (out->tool_choice == ToolChoice::kRequired || out->tool_choice == ToolChoice::kNamed))
    return bad_field("response_format", "response_format cannot be combined with a tool_choice that forces a call");
  return std::nullopt;
}

std::optional<ApiError> parse_chat(const Json& body, const SamplingDefaults& d, ChatRequest* out) {
  if (auto e = object_expected(body)) return e;
  Fields f(body, chat_fields());
  read_common(f, d, out);
  read_messages(f, out);
  const auto max_tokens = f.integer("max_tokens"), max_completion = f.integer("max_completion_tokens");
  if (max_completion)
    out->max_tokens = *max_completion;
  else if (max_tokens)
    out->max_tokens = *max_tokens;
  const auto logprobs = f.boolean("logprobs");
  const auto top = f.integer("top_logprobs");
  if (top && !logprobs.value_or(false)) f.fault(bad_field("top_logprobs", "top_logprobs needs logprobs: true"));
  if (logprobs.value_or(false)) out->sampling.logprobs = int(top.value_or(0));
  read_tools(f, out);
  read_template_input(f, out);
  if (const Json* m = f.get("modalities"); m && *m != Json::array({"text"}))
    f.fault(bad_field("modalities", "modalities may only be [\"text\"]"));
  if (f.ok())
    if (auto e = check_chat(out)) f.fault(std::move(*e));
  return f.finish();
}

std::optional<ApiError> parse_completion(const Json& body, const SamplingDefaults& d, CompletionRequest* out) {
  if (auto e = object_expected(body)) return e;
  Fields f(body, completion_fields());
  read_common(f, d, out);
  read_prompts(f, "prompt", &out->prompts);
  out->echo = f.boolean("echo").value_or(false);
  out->max_tokens = f.integer("max_tokens").value_or(16);
  if (out->max_tokens == 0 && !out->echo)
    f.fault(bad_field("max_tokens", "max_tokens 0 generates nothing; it is only useful with echo"));
  if (const auto logprobs = f.integer("logprobs")) out->sampling.logprobs = int(*logprobs);
  const auto best_of = f.integer("best_of");
  if (best_of && *best_of != out->n) f.fault(bad_field("best_of", "best_of is only supported when it equals n"));
  return f.finish();
}

std::optional<ApiError> parse_embedding(const Json& body, EmbeddingRequest* out) {
  if (auto e = object_expected(body)) return e;
  Fields f(body, embedding_fields());
  out->model = f.text("model").value_or("");
  read_prompts(f, "input", &out->inputs);
  if (const Json* j = f.get("encoding_format")) {
    if (*j != "float" && *j != "base64")
      f.fault(bad_field("encoding_format", "encoding_format must be float or base64"));
    out->base64 = *j == "base64";
  }
  if (const Json* j = f.get("pooling")) {
    if (*j != "mean" && *j != "last") f.fault(bad_field("pooling", "pooling must be mean or last"));
    out->pooling = *j == "last" ? runtime::Pooling::kLast : runtime::Pooling::kMean;
  }
  out->dimensions = f.integer("dimensions").value_or(-1);
  read_scheduling(f, out);
  return f.finish();
}

std::optional<ApiError> parse_tokenize(const Json& body, TokenizeRequest* out) {
  if (auto e = object_expected(body)) return e;
  Fields f(body, tokenize_fields());
  out->chat.model = optional_model(f);
  const auto prompt = f.text("prompt"), content = f.text("content");
  out->messages = f.get("messages") != nullptr;
  if (out->messages) read_messages(f, &out->chat);
  if (f.ok() && !prompt && !content && !out->messages)
    f.fault(bad_field("prompt", "prompt is missing; so are content and messages"));
  if ((prompt || content) && out->messages) f.fault(bad_field("messages", "give either a text or messages"));
  if (prompt && content && *prompt != *content) f.fault(bad_field("content", "prompt and content differ; give one"));
  out->text = prompt ? *prompt : content.value_or("");
  out->chat.add_generation_prompt = f.boolean("add_generation_prompt").value_or(true);
  out->parse_special = f.boolean("parse_special").value_or(true);
  out->pieces = f.boolean("with_pieces").value_or(false);
  out->strings = f.boolean("return_token_strs").value_or(false);
  if (const Json* tools = f.get("tools"))
    if (auto e = set_tools(*tools, "tools", &out->chat)) f.fault(std::move(*e));
  read_template_input(f, &out->chat);
  return f.finish();
}

std::optional<ApiError> parse_detokenize(const Json& body, DetokenizeRequest* out) {
  if (auto e = object_expected(body)) return e;
  Fields f(body, detokenize_fields());
  out->model = optional_model(f);
  out->skip_special_tokens = f.boolean("skip_special_tokens").value_or(false);
  if (const Json* j = f.get("tokens")) {
    const auto ids = j->is_array() ? token_ids(*j) : std::nullopt;
    if (ids)
      out->tokens = *ids;
    else
      f.fault(bad_field("tokens", "tokens must be a list of token ids"));
  }
  return f.finish();
}

std::optional<ApiError> parse_apply_template(const Json& body, ChatRequest* out) {
  if (auto e = object_expected(body)) return e;
  Fields f(body, apply_template_fields());
  out->model = optional_model(f);
  read_messages(f, out);
  out->add_generation_prompt = f.boolean("add_generation_prompt").value_or(true);
  if (const Json* tools = f.get("tools"))
    if (auto e = set_tools(*tools, "tools", out)) f.fault(std::move(*e));
  read_template_input(f, out);
  return f.finish();
}

}  // namespace mi::server
