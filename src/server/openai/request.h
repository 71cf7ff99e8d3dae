#pragma once
// Request bodies of /v1/chat/completions and /v1/completions as plain data. Parsing bounds and checks everything that
// can be checked without the model; what it returns is legal in form.

#include <string>
#include <variant>
#include <vector>

#include "base/json.h"
#include "runtime/request.h"
#include "server/openai/error.h"

namespace mi::server {

inline constexpr int64_t kMaxChoices = 128;  // n
inline constexpr size_t kMaxPrompts = 512;   // prompts in one completions request
inline constexpr size_t kMaxStops = 16;
inline constexpr size_t kMaxTools = 128;

// What generation_config.json says; a field that the request leaves out takes it.
struct SamplingDefaults {
  double temperature = 1.0, top_p = 1.0, min_p = 0.0, repetition_penalty = 1.0;
  int64_t top_k = 0;
};
// do_sample: false without a temperature means greedy.
SamplingDefaults sampling_defaults(const Json& generation_config);

struct CommonRequest {
  std::string model;
  runtime::SamplingParams sampling;  // logprobs filled from logprobs/top_logprobs
  int64_t max_tokens = -1;           // -1: not given
  std::vector<std::string> stop;
  int64_t n = 1;
  bool stream = false, include_usage = false;
};

enum class ToolChoice : uint8_t { kNone, kAuto, kRequired, kNamed };
struct Tool {
  std::string name;
  Json parameters;  // an object; {} when absent
};

enum class AnswerFormat : uint8_t { kText, kJsonObject, kJsonSchema };

struct ChatRequest : CommonRequest {
  Json messages;    // OpenAI-shaped; roles checked, contents joined to strings, call arguments parsed to objects
  Json tools_json;  // as given, for the template; null without tools
  std::vector<Tool> tools;
  ToolChoice tool_choice = ToolChoice::kNone;
  std::string tool_name;  // kNamed
  bool parallel_tool_calls = true;
  AnswerFormat format = AnswerFormat::kText;
  Json schema;           // kJsonSchema
  Json template_kwargs;  // further template variables, null if none
};

struct CompletionRequest : CommonRequest {
  std::vector<std::variant<std::string, std::vector<int32_t>>> prompts;
  bool echo = false;
};

std::optional<ApiError> parse_chat(const Json& body, const SamplingDefaults& defaults, ChatRequest* out);
std::optional<ApiError> parse_completion(const Json& body, const SamplingDefaults& defaults, CompletionRequest* out);

// The body as JSON, bounded in depth; the error has status 400.
std::variant<Json, ApiError> parse_body(const std::string& body);

}  // namespace mi::server
