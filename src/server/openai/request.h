#pragma once
// Request bodies of the OpenAI dialect as plain data. Parsing bounds and checks everything that can be checked without
// the model; what it returns is legal in form. ChatRequest is also what the other dialects are translated to.

#include <string>
#include <variant>
#include <vector>

#include "base/json.h"
#include "runtime/request.h"
#include "server/api/tables.h"
#include "server/openai/error.h"

namespace mi::server {

// What generation_config.json says; a field that the request leaves out takes it.
struct SamplingDefaults {
  double temperature = 1.0, top_p = 1.0, min_p = 0.0, repetition_penalty = 1.0;
  int64_t top_k = 0;
};
// do_sample: false without a temperature means greedy.
SamplingDefaults sampling_defaults(const Json& generation_config);

enum class AnswerFormat : uint8_t { kText, kJsonObject, kJsonSchema, kLark, kRegex };

// Nothing here changes an answer.
struct Scheduling {
  int64_t priority = 0;
  std::string cache_salt;
};

struct CommonRequest : Scheduling {
  std::string model;
  runtime::SamplingParams sampling;  // logprobs filled from logprobs/top_logprobs
  int64_t max_tokens = -1;           // -1: not given
  std::vector<std::string> stop;
  std::vector<int32_t> stop_token_ids;
  bool skip_special_tokens = true;
  AnswerFormat format = AnswerFormat::kText;
  Json schema;          // kJsonSchema
  std::string grammar;  // kLark, kRegex
  int64_t n = 1;
  bool stream = false, include_usage = false;
};

enum class ToolChoice : uint8_t { kNone, kAuto, kRequired, kNamed };
struct Tool {
  std::string name;
  Json parameters;      // an object; {} when absent
  bool strict = false;  // arguments must obey `parameters`, also where the model is free to call or not
};

struct ChatRequest : CommonRequest {
  Json messages;    // OpenAI-shaped; roles checked, contents joined to strings, call arguments parsed to objects
  Json tools_json;  // as given, for the template; null without tools
  std::vector<Tool> tools;
  ToolChoice tool_choice = ToolChoice::kNone;
  std::string tool_name;  // kNamed
  bool parallel_tool_calls = true;
  bool add_generation_prompt = true;
  Json template_kwargs;  // further template variables, null if none
};

struct CompletionRequest : CommonRequest {
  std::vector<std::variant<std::string, std::vector<int32_t>>> prompts;
  bool echo = false;
};

struct EmbeddingRequest : Scheduling {
  std::string model;
  std::vector<std::variant<std::string, std::vector<int32_t>>> inputs;
  runtime::Pooling pooling = runtime::Pooling::kMean;
  bool base64 = false;
  int64_t dimensions = -1;  // -1: not given
};

struct TokenizeRequest {
  std::string text;
  ChatRequest chat;  // if `messages`
  bool messages = false, parse_special = true, pieces = false, strings = false;
};

struct DetokenizeRequest {
  std::string model;
  std::vector<int32_t> tokens;
  bool skip_special_tokens = false;
};

std::optional<ApiError> parse_embedding(const Json& body, EmbeddingRequest* out);
std::optional<ApiError> parse_tokenize(const Json& body, TokenizeRequest* out);
std::optional<ApiError> parse_detokenize(const Json& body, DetokenizeRequest* out);
std::optional<ApiError> parse_apply_template(const Json& body, ChatRequest* out);

// Parts of a chat request that other dialects share. Each takes the OpenAI form; errors name `where`.
std::optional<ApiError> set_messages(const Json& messages, ChatRequest* out);
std::optional<ApiError> set_tools(const Json& tools, const std::string& where, ChatRequest* out);
// Template variables of a wanted effort of reasoning.
std::optional<ApiError> set_effort(const Json& effort, const char* param, ChatRequest* out);
// What cannot be asked for together; the last step of parsing a chat.
std::optional<ApiError> check_chat(ChatRequest* out);

std::optional<ApiError> parse_chat(const Json& body, const SamplingDefaults& defaults, ChatRequest* out);
std::optional<ApiError> parse_completion(const Json& body, const SamplingDefaults& defaults, CompletionRequest* out);

// The body as JSON, bounded in depth; the error has status 400.
std::variant<Json, ApiError> parse_body(const std::string& body);

}  // namespace mi::server
