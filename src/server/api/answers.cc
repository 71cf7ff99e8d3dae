// JSON schemas of answers. tests/system/test_api.py holds every answer of a running server against them.
#include "base/json.h"
#include "server/api/tables.h"

namespace mi::server {
namespace {

constexpr const char* kAnswers = R"json({
"Error": {"type": "object", "required": ["error"], "additionalProperties": false, "properties": {"error": {"type": "object",
  "required": ["message", "type", "param", "code"], "additionalProperties": false, "properties": {"message": {"type": "string"}, "type": {"type": "string"},
  "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]}}}}},
"AnthropicError": {"type": "object", "required": ["type", "error"], "additionalProperties": false, "properties": {"type": {"const": "error"},
  "error": {"type": "object", "required": ["type", "message"], "properties": {"type": {"type": "string"}, "message": {"type": "string"}}}}},
"Health": {"type": "object", "required": ["status"], "properties": {"status": {"enum": ["ok", "stuck"]}}},
"Ready": {"type": "object", "required": ["status"], "properties": {"status": {"enum": ["ready", "draining", "stuck"]}}},
"Version": {"type": "object", "required": ["version"], "properties": {"version": {"type": "string"}, "name": {"type": "string"}}},
"Model": {"type": "object", "required": ["id", "object", "created", "owned_by", "max_model_len"], "properties": {"id": {"type": "string"},
  "object": {"const": "model"}, "created": {"type": "integer"}, "owned_by": {"type": "string"}, "max_model_len": {"type": "integer"},
  "details": {"type": "object", "description": "Facts of the engine, and how its model spells calls and reasoning."}}},
"ModelList": {"type": "object", "required": ["object", "data"], "properties": {"object": {"const": "list"},
  "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}}}},
"Usage": {"type": "object", "required": ["prompt_tokens", "completion_tokens", "total_tokens"], "properties": {"prompt_tokens": {"type": "integer"},
  "completion_tokens": {"type": "integer"}, "total_tokens": {"type": "integer"},
  "prompt_tokens_details": {"type": "object", "properties": {"cached_tokens": {"type": "integer"}}},
  "completion_tokens_details": {"type": "object", "properties": {"reasoning_tokens": {"type": "integer"}}}}},
"ChatLogprob": {"type": "object", "required": ["token", "logprob", "bytes"], "properties": {"token": {"type": "string"}, "logprob": {"type": "number"},
  "bytes": {"type": "array", "items": {"type": "integer"}},
  "top_logprobs": {"type": "array", "items": {"$ref": "#/components/schemas/ChatLogprob"}}}},
"ChatLogprobs": {"type": ["object", "null"], "required": ["content"], "properties": {
  "content": {"type": "array", "items": {"$ref": "#/components/schemas/ChatLogprob"}}, "refusal": {"type": "null"}}},
"ToolCall": {"type": "object", "required": ["id", "type", "function"], "properties": {"id": {"type": "string"}, "type": {"const": "function"},
  "function": {"type": "object", "required": ["name", "arguments"], "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}}}}},
"ChatCompletion": {"type": "object", "required": ["id", "object", "created", "model", "choices", "usage"], "additionalProperties": false, "properties": {
  "id": {"type": "string"}, "object": {"const": "chat.completion"}, "created": {"type": "integer"}, "model": {"type": "string"},
  "choices": {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["index", "message", "logprobs", "finish_reason"],
    "additionalProperties": false, "properties": {
    "index": {"type": "integer"}, "finish_reason": {"enum": ["stop", "length", "tool_calls"]}, "logprobs": {"$ref": "#/components/schemas/ChatLogprobs"},
    "message": {"type": "object", "required": ["role", "content", "refusal"], "additionalProperties": false, "properties": {"role": {"const": "assistant"},
      "content": {"type": ["string", "null"]}, "refusal": {"type": "null"}, "reasoning_content": {"type": "string"},
      "tool_calls": {"type": "array", "items": {"$ref": "#/components/schemas/ToolCall"}}}}}}},
  "usage": {"$ref": "#/components/schemas/Usage"}}},
"ChatCompletionChunk": {"type": "object", "required": ["id", "object", "created", "model", "choices"], "additionalProperties": false, "properties": {
  "id": {"type": "string"}, "object": {"const": "chat.completion.chunk"}, "created": {"type": "integer"}, "model": {"type": "string"},
  "choices": {"type": "array", "items": {"type": "object", "required": ["index", "delta", "logprobs", "finish_reason"],
    "additionalProperties": false, "properties": {
    "index": {"type": "integer"}, "finish_reason": {"enum": ["stop", "length", "tool_calls", null]}, "logprobs": {"$ref": "#/components/schemas/ChatLogprobs"},
    "delta": {"type": "object", "additionalProperties": false, "properties": {"role": {"const": "assistant"}, "content": {"type": "string"},
      "reasoning_content": {"type": "string"}, "tool_calls": {"type": "array", "items": {"type": "object", "required": ["index", "function"]}}}}}}},
  "usage": {"$ref": "#/components/schemas/Usage"}}},
"Completion": {"type": "object", "required": ["id", "object", "created", "model", "choices"], "additionalProperties": false, "properties": {
  "id": {"type": "string"}, "object": {"const": "text_completion"}, "created": {"type": "integer"}, "model": {"type": "string"},
  "choices": {"type": "array", "items": {"type": "object", "required": ["index", "text", "logprobs", "finish_reason"], "additionalProperties": false,
    "properties": {"index": {"type": "integer"}, "text": {"type": "string"}, "finish_reason": {"enum": ["stop", "length", null]},
    "logprobs": {"type": ["object", "null"], "required": ["tokens", "token_logprobs", "top_logprobs", "text_offset"], "properties": {
      "tokens": {"type": "array", "items": {"type": "string"}}, "token_logprobs": {"type": "array", "items": {"type": ["number", "null"]}},
      "top_logprobs": {"type": "array", "items": {"type": ["object", "null"]}}, "text_offset": {"type": "array", "items": {"type": "integer"}}}}}}},
  "usage": {"$ref": "#/components/schemas/Usage"}}},
"Embeddings": {"type": "object", "required": ["object", "data", "model", "usage"], "additionalProperties": false, "properties": {
  "object": {"const": "list"}, "model": {"type": "string"},
  "data": {"type": "array", "items": {"type": "object", "required": ["object", "index", "embedding"], "properties": {"object": {"const": "embedding"},
    "index": {"type": "integer"}, "embedding": {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]}}}},
  "usage": {"type": "object", "required": ["prompt_tokens", "total_tokens"], "properties": {"prompt_tokens": {"type": "integer"}, "total_tokens": {"type": "integer"}}}}},
"TokenizerInfo": {"type": "object", "required": ["tokenizer_class", "vocab_size", "add_bos_token"], "additionalProperties": false, "properties": {
  "tokenizer_class": {"type": "string"}, "vocab_size": {"type": "integer"}, "add_bos_token": {"const": false}, "bos_token": {"type": ["string", "null"]},
  "eos_token": {"type": ["string", "null"]}, "pad_token": {"type": ["string", "null"]}, "unk_token": {"type": ["string", "null"]},
  "chat_template": {"type": ["string", "null"]}}},
"Tokens": {"type": "object", "required": ["tokens", "count", "max_model_len"], "additionalProperties": false, "properties": {
  "tokens": {"type": "array", "items": {"type": "integer"}}, "count": {"type": "integer"}, "max_model_len": {"type": "integer"},
  "token_strs": {"type": "array", "items": {"type": "string"}},
  "pieces": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}}}},
"Text": {"type": "object", "required": ["prompt", "content"], "additionalProperties": false, "properties": {"prompt": {"type": "string"},
  "content": {"type": "string", "description": "the same as prompt"}}},
"Prompt": {"type": "object", "required": ["prompt"], "additionalProperties": false, "properties": {"prompt": {"type": "string"}}},
"TokenCount": {"type": "object", "required": ["input_tokens"], "additionalProperties": false, "properties": {"input_tokens": {"type": "integer"}}},
"MessageUsage": {"type": "object", "required": ["input_tokens", "output_tokens"], "properties": {"input_tokens": {"type": "integer"}, "output_tokens": {"type": "integer"},
  "cache_creation_input_tokens": {"type": "integer"}, "cache_read_input_tokens": {"type": "integer"}}},
"Message": {"type": "object", "required": ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"],
  "additionalProperties": false, "properties": {"id": {"type": "string"},
  "type": {"const": "message"}, "role": {"const": "assistant"}, "model": {"type": "string"},
  "content": {"type": "array", "items": {"anyOf": [
    {"type": "object", "required": ["type", "text"], "properties": {"type": {"const": "text"}, "text": {"type": "string"}}},
    {"type": "object", "required": ["type", "thinking", "signature"], "properties": {"type": {"const": "thinking"}, "thinking": {"type": "string"}, "signature": {"type": "string"}}},
    {"type": "object", "required": ["type", "id", "name", "input"], "properties": {"type": {"const": "tool_use"}, "id": {"type": "string"}, "name": {"type": "string"}, "input": {"type": "object"}}}]}},
  "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", null]}, "stop_sequence": {"type": ["string", "null"]},
  "usage": {"$ref": "#/components/schemas/MessageUsage"}}},
"MessageEvent": {"type": "object", "required": ["type"], "properties": {
  "type": {"enum": ["message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop", "error"]},
  "message": {"$ref": "#/components/schemas/Message"}, "index": {"type": "integer"}, "content_block": {"type": "object"},
  "delta": {"type": "object"}, "usage": {"$ref": "#/components/schemas/MessageUsage"}}},
"OutputItem": {"anyOf": [
  {"type": "object", "required": ["id", "type", "status", "role", "content"], "properties": {"id": {"type": "string"}, "type": {"const": "message"},
    "status": {"enum": ["in_progress", "completed", "incomplete"]}, "role": {"const": "assistant"}, "content": {"type": "array", "items": {"type": "object",
    "required": ["type", "text", "annotations"], "properties": {"type": {"const": "output_text"}, "text": {"type": "string"}}}}}},
  {"type": "object", "required": ["id", "type", "status", "summary", "content"], "properties": {"type": {"const": "reasoning"}}},
  {"type": "object", "required": ["id", "type", "status", "call_id", "name", "arguments"], "properties": {"type": {"const": "function_call"},
    "call_id": {"type": "string"}, "name": {"type": "string"}, "arguments": {"type": "string"}}}]},
"Response": {"type": "object", "required": ["id", "object", "created_at", "status", "model", "output", "usage", "error", "incomplete_details", "instructions",
  "metadata", "parallel_tool_calls", "temperature", "tool_choice", "tools", "top_p"], "properties": {"id": {"type": "string"}, "object": {"const": "response"},
  "created_at": {"type": "integer"}, "status": {"enum": ["in_progress", "completed", "incomplete"]}, "model": {"type": "string"},
  "output": {"type": "array", "items": {"$ref": "#/components/schemas/OutputItem"}},
  "incomplete_details": {"type": ["object", "null"]}, "error": {"type": "null"},
  "usage": {"type": ["object", "null"], "required": ["input_tokens", "output_tokens", "total_tokens"], "properties": {"input_tokens": {"type": "integer"},
    "output_tokens": {"type": "integer"}, "total_tokens": {"type": "integer"}}}}},
"ResponseEvent": {"type": "object", "required": ["type", "sequence_number"], "properties": {"sequence_number": {"type": "integer"},
  "type": {"enum": ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added", "response.output_text.delta",
    "response.output_text.done", "response.reasoning_text.delta", "response.reasoning_text.done", "response.content_part.done",
    "response.function_call_arguments.delta", "response.function_call_arguments.done", "response.output_item.done", "response.completed",
    "response.incomplete", "error"]},
  "response": {"$ref": "#/components/schemas/Response"}, "item": {"$ref": "#/components/schemas/OutputItem"}}}
})json";

}  // namespace

Json answer_schemas() {
  auto parsed = parse_json(kAnswers, "the schemas of answers");
  MI_CHECK(parsed.ok(), "{}", parsed.error().message());
  return std::move(parsed).value();
}

}  // namespace mi::server
