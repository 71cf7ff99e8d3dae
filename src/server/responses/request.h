#pragma once
// Bodies of /v1/responses as chat requests.

#include "server/openai/request.h"

namespace mi::server {

struct ResponseRequest {
  Json instructions, tools, tool_choice, text_format, metadata, effort;  // as given, to be told back; null if absent
};
std::optional<ApiError> parse_response(const Json& body, const SamplingDefaults& defaults, ChatRequest* out,
                                       ResponseRequest* told);

}  // namespace mi::server
