#include "server/api/tables.h"

#include "runtime/request.h"

namespace mi::server {
namespace {

constexpr const char* kModelAbout = "Name of the served model, as /v1/models lists it.";
constexpr const char* kStop =
    R"({"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "maxItems": 16, "items": {"type": "string", "minLength": 1}}]})";
constexpr const char* kIds = R"({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2147483647}})";
constexpr const char* kPrompt =
    R"({"anyOf": [{"type": "string", "minLength": 1},
      {"type": "array", "minItems": 1, "maxItems": 512, "items": {"anyOf": [{"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2147483647}}]}},
      {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2147483647}}]})";
constexpr const char* kTools =
    R"({"type": "array", "maxItems": 128, "items": {"type": "object", "required": ["type", "function"], "properties": {
      "type": {"const": "function"},
      "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string", "minLength": 1},
        "description": {"type": ["string", "null"]}, "parameters": {"type": ["object", "null"]}, "strict": {"type": ["boolean", "null"]}}}}}})";
constexpr const char* kToolChoice =
    R"({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object", "required": ["function"], "properties": {
      "type": {"const": "function"},
      "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}}}]})";
constexpr const char* kResponseFormat =
    R"({"type": "object", "required": ["type"], "properties": {
      "type": {"enum": ["text", "json_object", "json_schema", "grammar", "regex"]},
      "json_schema": {"type": "object", "required": ["schema"], "properties": {"name": {"type": ["string", "null"]}, "schema": {"type": "object"},
        "strict": {"type": ["boolean", "null"]}, "description": {"type": ["string", "null"]}}},
      "grammar": {"type": "string", "description": "with type grammar: a Lark grammar as llguidance reads it"},
      "regex": {"type": "string", "description": "with type regex: a regular expression for the whole answer"}}})";
constexpr const char* kObject = R"({"type": "object"})";

FieldTable sampling() {
  return {
      number_field("temperature", 0, 1e6, "0 is greedy. Default: the model's generation_config.json, else 1."),
      number_field("top_p", 0, 1, "Keeps the likeliest tokens that together have this probability."),
      integer_field("top_k", -1, kNoHigh, "Keeps so many of the likeliest tokens; 0 or -1: all."),
      number_field("min_p", 0, 1, "Drops tokens less likely than this times the likeliest."),
      number_field("presence_penalty", -2, 2, "Subtracted once from every token of the output so far."),
      number_field("frequency_penalty", -2, 2, "Subtracted per occurrence in the output so far."),
      number_field("repetition_penalty", 1e-6, 1e6,
                   "Logits of tokens in prompt or output are divided (if positive) or multiplied by it."),
      json_field("logit_bias",
                 R"({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}})",
                 "Token ids and what is added to their logits."),
      json_field("seed", R"({"type": "integer"})",
                 "The same seed gives the same answer, whatever else runs. Choice i of n takes seed + i."),
      integer_field("min_tokens", 0, INT32_MAX, "No end and no stop string before so many tokens."),
      flag_field("ignore_eos", "The model's end tokens are ordinary tokens."),
      json_field("stop_token_ids", kIds, "Further end tokens."),
      flag_field("skip_special_tokens", "Special tokens leave no text. Default true."),
      refused_field("include_stop_str_in_output", "the text always ends before the stop string"),
      refused_field("use_beam_search", "answers are sampled"),
      refused_field("length_penalty", "it belongs to beam search"),
  };
}

// Of every request that the model runs for; read by read_scheduling().
FieldTable scheduling() {
  constexpr double kLargestPriority = 1 << 20;
  return {
      integer_field("priority", -kLargestPriority, kLargestPriority,
                    "Smaller ones are served first and take the place of running ones with larger ones; answers do "
                    "not depend on it. Default 0."),
      text_field("cache_salt", "Keys and values are reused only between requests with the same salt. Default empty."),
  };
}

FieldTable bookkeeping() {
  return {
      ignored_field("user", "the caller's bookkeeping."),
      ignored_field("metadata", "the caller's bookkeeping."),
      ignored_field("store", "nothing is stored."),
      ignored_field("service_tier", "there is one tier."),
      ignored_field("safety_identifier", "the caller's bookkeeping."),
      ignored_field("prompt_cache_key", "answers do not depend on any cache."),
      ignored_field("prompt_cache_retention", "answers do not depend on any cache."),
      ignored_field("prompt_cache_options", "answers do not depend on any cache."),
  };
}

FieldTable common() {
  return joined(
      {{text_field("model", kModelAbout, FieldUse::kRequired)},
       sampling(),
       {integer_field("n", 1, double(kMaxChoices), "Number of answers."),
        json_field("stop", kStop, "The text ends before the first of these strings."),
        json_field("response_format", kResponseFormat, "What form the answer must have; enforced by grammar."),
        flag_field("stream", "Server-sent events, ended by \"data: [DONE]\"."),
        object_field("stream_options", stream_options_fields, "Only with stream: true.")},
       scheduling(),
       bookkeeping()});
}

FieldTable template_input() {
  return {
      json_field("tools", kTools, "Functions that the model may call."),
      json_field("chat_template_kwargs", kObject, "Further variables of the chat template."),
      json_field("reasoning_effort", R"({"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max"]})",
                 "Handed to the chat template; \"none\" also sets enable_thinking to false."),
  };
}

FieldSpec messages_field(FieldUse use) {
  FieldSpec f{
      "messages", use, FieldType::kObjects, 0, 0, message_fields, nullptr, "The conversation so far; not empty."};
  return f;
}

}  // namespace

const FieldTable& stream_options_fields() {
  static const FieldTable t = {
      flag_field("include_usage", "A last event with the usage and no choices."),
      ignored_field("include_obfuscation", "events are not padded."),
      ignored_field("continuous_usage_stats", "usage comes once, in the last event."),
  };
  return t;
}

const FieldTable& message_fields() {
  static const FieldTable t = {
      json_field("role", R"({"enum": ["system", "developer", "user", "assistant", "tool"]})",
                 "developer counts as system.", FieldUse::kRequired),
      json_field("content",
                 R"({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object", "required": ["type"],
                   "properties": {"type": {"enum": ["text", "refusal"]}, "text": {"type": "string"}, "refusal": {"type": "string"}}}}]})",
                 "Text, or text parts, which are joined by line ends. Only an assistant message may lack it."),
      text_field("name", "Handed to the chat template."),
      text_field("tool_call_id", "Handed to the chat template."),
      json_field("tool_calls",
                 R"({"type": "array", "items": {"type": "object", "required": ["function"], "properties": {
                   "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"},
                     "arguments": {"type": ["string", "object", "null"], "description": "a JSON object or its text"}}}}}})",
                 "Calls that an assistant message made."),
      text_field("reasoning_content", "Reasoning of an assistant message; the chat template decides what it keeps."),
      text_field("reasoning", "The same as reasoning_content."),
      ignored_field("refusal", "not shown to the model."),
      ignored_field("annotations", "not shown to the model."),
      refused_field("audio", "this model reads text"),
      refused_field("function_call", "use tool_calls"),
  };
  return t;
}

const FieldTable& chat_fields() {
  static const FieldTable t = joined(
      {common(),
       {messages_field(FieldUse::kRequired)},
       template_input(),
       {integer_field("max_tokens", 1, kNoHigh, "Most tokens to generate; default: what the context leaves."),
        integer_field("max_completion_tokens", 1, kNoHigh, "The same; it wins over max_tokens."),
        flag_field("logprobs", "Log-probabilities of the answer's tokens."),
        integer_field("top_logprobs", 0, runtime::kMaxLogprobs, "So many likeliest tokens each; needs logprobs: true."),
        json_field("tool_choice", kToolChoice,
                   "none, auto, required, or one function; required and a named function are enforced by grammar."),
        flag_field("parallel_tool_calls", "false: at most one call."),
        json_field("modalities", R"({"type": "array", "items": {"const": "text"}})", "Only text."),
        refused_field("functions", "use tools"), refused_field("function_call", "use tool_choice"),
        refused_field("audio", "this server makes text"),
        refused_field("web_search_options", "this server searches nothing"),
        refused_field("moderation", "this server judges no content"),
        refused_field("verbosity", "say it in the prompt"),
        ignored_field("prediction", "it could only change the speed."),
        ignored_field("prompt", "it belongs to /v1/completions."),
        ignored_field("input", "it belongs to /v1/responses."), ignored_field("content", "it belongs to /tokenize."),
        ignored_field("tokens", "it belongs to /detokenize.")}});
  return t;
}

const FieldTable& completion_fields() {
  static const FieldTable t = joined(
      {common(),
       {json_field("prompt", kPrompt, "One prompt or up to 512, as text or token ids.", FieldUse::kRequired),
        flag_field("echo", "The answer begins with the prompt; with logprobs its tokens are scored."),
        integer_field("max_tokens", 0, kNoHigh, "Most tokens to generate; 0 only with echo. Default 16."),
        integer_field("logprobs", 0, runtime::kMaxLogprobs, "Log-probabilities, and of so many likeliest tokens."),
        integer_field("best_of", 1, double(kMaxChoices), "Must equal n."),
        refused_field("suffix", "this model cannot fill in the middle")}});
  return t;
}

const FieldTable& embedding_fields() {
  static const FieldTable t = joined(
      {{
           text_field("model", kModelAbout, FieldUse::kRequired),
           json_field("input", kPrompt, "One text or up to 512, as text or token ids.", FieldUse::kRequired),
           json_field("encoding_format", R"({"enum": ["float", "base64"]})", "base64: little-endian 32-bit floats."),
           json_field("pooling", R"({"enum": ["mean", "last"]})",
                      "How the tokens' hidden states become one: their mean (default) or that of the last token."),
           integer_field("dimensions", 1, kNoHigh, "Must equal the model's hidden size."),
           ignored_field("user", "the caller's bookkeeping."),
       },
       scheduling()});
  return t;
}

const FieldTable& tokenize_fields() {
  static const FieldTable t = joined(
      {{text_field("model", kModelAbout),
        text_field("prompt", "The text. Exactly one of prompt, content and messages must be there, or equal ones."),
        text_field("content", "The same as prompt."), messages_field(FieldUse::kUsed),
        flag_field("add_generation_prompt", "With messages: the template also opens the answer. Default true."),
        flag_field("parse_special",
                   "Special tokens in the text become their ids. Default true, as in /v1/completions."),
        flag_field("with_pieces", "Also the tokens' bytes, as text where they are text, else as a list of numbers."),
        flag_field("return_token_strs", "Also the tokens as strings."),
        ignored_field("add_special", "begin and end tokens are never added; /v1/completions adds none either."),
        ignored_field("add_special_tokens", "begin and end tokens are never added; /v1/completions adds none either.")},
       template_input()});
  return t;
}

const FieldTable& detokenize_fields() {
  static const FieldTable t = {
      text_field("model", kModelAbout),
      json_field("tokens", kIds, "Token ids.", FieldUse::kRequired),
      flag_field("skip_special_tokens", "Special tokens leave no text. Default false."),
  };
  return t;
}

const FieldTable& apply_template_fields() {
  static const FieldTable t =
      joined({{text_field("model", kModelAbout), messages_field(FieldUse::kRequired),
               flag_field("add_generation_prompt", "The template also opens the answer. Default true.")},
              template_input()});
  return t;
}

namespace {

FieldTable anthropic_input() {
  return {
      text_field("model", kModelAbout, FieldUse::kRequired),
      json_field(
          "messages",
          R"({"type": "array", "minItems": 1, "items": {"type": "object", "required": ["role", "content"], "properties": {
                   "role": {"enum": ["user", "assistant", "system"]},
                   "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object", "required": ["type"], "properties": {
                     "type": {"enum": ["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]}}}}]}}}})",
          "The conversation so far; not empty.", FieldUse::kRequired),
      json_field(
          "system",
          R"({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object", "required": ["type", "text"],
                   "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}}]})",
          "The system prompt."),
      json_field("tools",
                 R"({"type": "array", "maxItems": 128, "items": {"type": "object", "required": ["name"], "properties": {
                   "type": {"enum": ["custom", null]}, "name": {"type": "string", "minLength": 1}, "description": {"type": ["string", "null"]},
                   "input_schema": {"type": "object"}, "strict": {"type": ["boolean", "null"]}}}})",
                 "Functions that the model may call. Tools that a server would run are refused."),
      json_field(
          "tool_choice",
          R"({"type": "object", "required": ["type"], "properties": {"type": {"enum": ["auto", "any", "tool", "none"]},
                   "name": {"type": "string"}, "disable_parallel_tool_use": {"type": "boolean"}}})",
          "any and tool are enforced by grammar."),
      json_field(
          "thinking",
          R"({"type": "object", "required": ["type"], "properties": {"type": {"enum": ["enabled", "disabled", "adaptive"]},
                   "budget_tokens": {"type": ["integer", "null"], "minimum": 1}, "display": {"type": ["string", "null"]}}})",
          "Handed to the chat template as enable_thinking. budget_tokens is ignored: max_tokens bounds both."),
      json_field(
          "output_config",
          R"({"type": "object", "properties": {"effort": {"enum": ["low", "medium", "high", "xhigh", "max", null]},
                   "format": {"type": ["object", "null"], "required": ["type", "schema"], "properties": {"type": {"const": "json_schema"},
                     "schema": {"type": "object"}}}}})",
          "effort is handed to the chat template as reasoning_effort; format is enforced by grammar."),
      ignored_field("cache_control", "answers do not depend on any cache."),
      refused_field("container", "this server runs no tools"),
      refused_field("mcp_servers", "this server runs no tools"),
      refused_field("context_management", "the whole conversation is read"),
  };
}

}  // namespace

const FieldTable& anthropic_message_fields() {
  static FieldSpec max_tokens = integer_field("max_tokens", 1, kNoHigh, "Most tokens to generate, thinking included.");
  max_tokens.use = FieldUse::kRequired;
  static const FieldTable t = joined(
      {anthropic_input(),
       {max_tokens,
        json_field("stop_sequences",
                   R"({"type": "array", "maxItems": 16, "items": {"type": "string", "minLength": 1}})",
                   "The text ends before the first of these strings."),
        number_field("temperature", 0, 1e6, "0 is greedy. Default: the model's generation_config.json, else 1."),
        number_field("top_p", 0, 1, "Keeps the likeliest tokens that together have this probability."),
        integer_field("top_k", -1, kNoHigh, "Keeps so many of the likeliest tokens; 0 or -1: all."),
        flag_field("stream", "Server-sent events."), ignored_field("metadata", "the caller's bookkeeping."),
        ignored_field("service_tier", "there is one tier."), ignored_field("inference_geo", "there is one place."),
        ignored_field("speed", "there is one speed."), ignored_field("diagnostics", "the caller's bookkeeping."),
        ignored_field("user_profile_id", "the caller's bookkeeping."),
        ignored_field("workspace_id", "the caller's bookkeeping.")},
       scheduling()});
  return t;
}

const FieldTable& count_tokens_fields() {
  static const FieldTable t = anthropic_input();
  return t;
}

const FieldTable& response_text_fields() {
  static const FieldTable t = {
      json_field(
          "format",
          R"({"type": "object", "required": ["type"], "properties": {"type": {"enum": ["text", "json_object", "json_schema"]},
                   "name": {"type": ["string", "null"]}, "schema": {"type": "object"}, "strict": {"type": ["boolean", "null"]},
                   "description": {"type": "string"}}})",
          "What form the answer must have; enforced by grammar."),
      refused_field("verbosity", "say it in the prompt"),
  };
  return t;
}

const FieldTable& response_reasoning_fields() {
  static const FieldTable t = {
      json_field("effort", R"({"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max"]})",
                 "Handed to the chat template; \"none\" also sets enable_thinking to false."),
      ignored_field("summary", "reasoning comes whole, not summed up."),
      ignored_field("generate_summary", "reasoning comes whole, not summed up."),
  };
  return t;
}

const FieldTable& response_fields() {
  static const FieldTable t = joined(
      {{
           text_field("model", kModelAbout, FieldUse::kRequired),
           json_field(
               "input",
               R"({"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"type": "object", "properties": {
                   "type": {"enum": ["message", "function_call", "function_call_output", "reasoning", null]},
                   "role": {"enum": ["user", "assistant", "system", "developer", null]}}}}]})",
               "A text, or the conversation as items.", FieldUse::kRequired),
           text_field("instructions", "A system prompt before the input."),
           integer_field("max_output_tokens", 1, kNoHigh, "Most tokens to generate, reasoning included."),
           flag_field("stream", "Server-sent events."),
           number_field("temperature", 0, 1e6, "0 is greedy. Default: the model's generation_config.json, else 1."),
           number_field("top_p", 0, 1, "Keeps the likeliest tokens that together have this probability."),
           json_field(
               "tools",
               R"({"type": "array", "maxItems": 128, "items": {"type": "object", "required": ["type", "name"], "properties": {
                   "type": {"const": "function"}, "name": {"type": "string", "minLength": 1}, "description": {"type": ["string", "null"]},
                   "parameters": {"type": ["object", "null"]}, "strict": {"type": ["boolean", "null"]}}}})",
               "Functions that the model may call. Tools that a server would run are refused."),
           json_field(
               "tool_choice",
               R"({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object", "required": ["type", "name"], "properties": {
                   "type": {"const": "function"}, "name": {"type": "string"}}}]})",
               "required and a named function are enforced by grammar."),
           flag_field("parallel_tool_calls", "false: at most one call."),
           object_field("text", response_text_fields, "The form of the answer."),
           object_field("reasoning", response_reasoning_fields, "How long to reason."),
           json_field("truncation", R"({"const": "disabled"})", "What does not fit is refused."),
           json_field("background", R"({"const": false})", "The answer comes in the same exchange."),
           json_field("include", R"({"type": "array", "items": {"const": "reasoning.encrypted_content"}})",
                      "Reasoning is not encrypted, so there is nothing to include."),
           json_field("metadata", kObject, "Comes back in the answer."),
           ignored_field("store", "nothing is stored."),
           ignored_field("user", "the caller's bookkeeping."),
           ignored_field("safety_identifier", "the caller's bookkeeping."),
           ignored_field("prompt_cache_key", "answers do not depend on any cache."),
           ignored_field("prompt_cache_retention", "answers do not depend on any cache."),
           ignored_field("prompt_cache_options", "answers do not depend on any cache."),
           ignored_field("service_tier", "there is one tier."),
           ignored_field("background_options", "the answer comes in the same exchange."),
           ignored_field("max_tool_calls", "it counts tools that a server runs."),
           ignored_field("stream_options", "events are not padded."),
           refused_field("previous_response_id", "nothing is stored; send the conversation as input"),
           refused_field("conversation", "nothing is stored; send the conversation as input"),
           refused_field("prompt", "there are no stored prompts"),
           refused_field("top_logprobs", "use /v1/chat/completions"),
           refused_field("moderation", "this server judges no content"),
           refused_field("image", "this server makes text"),
           refused_field("access_programs", "this server runs no tools"),
           refused_field("context_management", "the whole conversation is read"),
       },
       scheduling()});
  return t;
}

const std::vector<RouteSpec>& routes() {
  static const std::vector<RouteSpec> r = {
      {"/health", "GET HEAD", "health", "The process answers, and the model makes progress.", nullptr, "Health",
       nullptr, Dialect::kOpenAi, true},
      {"/ready", "GET HEAD", "ready",
       "200 when new requests are taken; 503 while the server ends or makes no progress.", nullptr, "Ready", nullptr,
       Dialect::kOpenAi, true},
      {"/version", "GET HEAD", "version", "The program's version.", nullptr, "Version"},
      {"/metrics", "GET", "metrics", "Numbers in the Prometheus text format."},
      {"/openapi.json", "GET HEAD", "openapi", "This description."},
      {"/v1/models", "GET HEAD", "list_models", "The served model.", nullptr, "ModelList"},
      {"/v1/models/{model}", "GET HEAD", "retrieve_model", "One served model.", nullptr, "Model"},
      {"/v1/chat/completions", "POST", "chat_completions", "Answers a conversation.", chat_fields, "ChatCompletion",
       "ChatCompletionChunk"},
      {"/v1/completions", "POST", "completions", "Continues a text.", completion_fields, "Completion", "Completion"},
      {"/v1/responses", "POST", "responses", "Answers a conversation given as items. Nothing is stored.",
       response_fields, "Response", "ResponseEvent"},
      {"/v1/messages", "POST", "messages", "Answers a conversation, in Anthropic's form.", anthropic_message_fields,
       "Message", "MessageEvent", Dialect::kAnthropic},
      {"/v1/messages/count_tokens", "POST", "count_tokens", "Tokens that a message request would have.",
       count_tokens_fields, "TokenCount", nullptr, Dialect::kAnthropic},
      {"/v1/embeddings", "POST", "embeddings", "The model's last hidden states, pooled, of length 1.", embedding_fields,
       "Embeddings"},
      {"/tokenizer_info", "GET", "tokenizer_info",
       "Special tokens and chat template, as lm-eval's remote tokenizer asks for them.", nullptr, "TokenizerInfo"},
      {"/tokenize", "POST", "tokenize", "Text or a conversation as token ids.", tokenize_fields, "Tokens"},
      {"/detokenize", "POST", "detokenize", "Token ids as text.", detokenize_fields, "Text"},
      {"/apply-template", "POST", "apply_template", "What the model is given for a conversation.",
       apply_template_fields, "Prompt"},
  };
  return r;
}

const RouteSpec* find_route(std::string_view path) {
  for (const RouteSpec& r : routes()) {
    const std::string_view p = r.path;
    if (p == path) return &r;
    const size_t open = p.find('{');
    if (open != std::string_view::npos && path.size() > open && path.substr(0, open) == p.substr(0, open) &&
        path.find('/', open) == std::string_view::npos)
      return &r;
  }
  return nullptr;
}

}  // namespace mi::server
