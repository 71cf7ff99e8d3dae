#pragma once
// The Anthropic dialect: bodies of /v1/messages and its count_tokens as chat requests, its errors and reasons.

#include "server/openai/request.h"

namespace mi::server {

std::optional<ApiError> parse_message(const Json& body, const SamplingDefaults& defaults, ChatRequest* out);
std::optional<ApiError> parse_count_tokens(const Json& body, ChatRequest* out);

// {"type": "error", "error": {"type", "message"}}
std::string anthropic_error_json(const ApiError& e);

}  // namespace mi::server
