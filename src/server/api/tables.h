#pragma once
// Every route and every field of a request body.

#include <string_view>
#include <vector>

#include "server/api/field_table.h"

namespace mi::server {

enum class Dialect : uint8_t { kOpenAi, kAnthropic };  // the shape of errors

struct RouteSpec {
  const char* path;     // "{...}" at the end stands for one name
  const char* methods;  // "GET HEAD" or "POST"
  const char* id;       // operationId, and the endpoint's name in metrics
  const char* about;
  const FieldTable& (*body)() = nullptr;  // null: no body
  const char* answer = nullptr;           // its schema in answers.cc; null: text or no fixed form
  const char* event = nullptr;            // schema of a streamed event; null: does not stream
  Dialect dialect = Dialect::kOpenAi;
  bool open = false;  // needs no key
};
const std::vector<RouteSpec>& routes();
const RouteSpec* find_route(std::string_view path);

// JSON schemas of answers, by name; "Error" and "AnthropicError" are among them.
Json answer_schemas();

const FieldTable& chat_fields();
const FieldTable& message_fields();
const FieldTable& stream_options_fields();
const FieldTable& completion_fields();
const FieldTable& embedding_fields();
const FieldTable& tokenize_fields();
const FieldTable& detokenize_fields();
const FieldTable& apply_template_fields();
const FieldTable& anthropic_message_fields();
const FieldTable& count_tokens_fields();
const FieldTable& response_fields();
const FieldTable& response_text_fields();
const FieldTable& response_reasoning_fields();

inline constexpr int64_t kMaxChoices = 128;  // n
inline constexpr size_t kMaxPrompts = 512;   // prompts in one completions or embeddings request
inline constexpr size_t kMaxStops = 16;
inline constexpr size_t kMaxTools = 128;

}  // namespace mi::server
