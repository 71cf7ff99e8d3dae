#include "server/responses/request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace mi::server {
namespace {

using testing::HasSubstr;

std::optional<ApiError> parse_responses(const std::string& fields, ChatRequest* r) {
  ResponseRequest told;
  return parse_response(parse_json(R"({"model": "m", )" + fields + "}", "b").value(), {}, r, &told);
}
std::string responses_error(const std::string& fields) {
  ChatRequest r;
  const auto e = parse_responses(fields, &r);
  return e ? e->message : "accepted";
}

TEST(ResponseParse, ItemsBecomeAChat) {
  ChatRequest r;
  const auto e = parse_responses(
      R"("instructions": "be kind", "input": [{"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [{"type": "output_text", "text": "let me see", "annotations": []}]},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{\"city\": \"Oslo\"}"},
    {"type": "function_call_output", "call_id": "c1", "output": "rain"}],
    "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": true}],
    "tool_choice": {"type": "function", "name": "weather"}, "reasoning": {"effort": "low"}, "max_output_tokens": 9)",
      &r);
  ASSERT_FALSE(e) << e->message;
  EXPECT_EQ(r.messages,
            parse_json(R"([{"role": "system", "content": "be kind"}, {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": "let me see", "reasoning_content": "hm",
     "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]},
    {"role": "tool", "content": "rain", "tool_call_id": "c1"}])",
                       "m")
                .value());
  EXPECT_EQ(r.tool_choice, ToolChoice::kNamed);
  EXPECT_EQ(r.template_kwargs["reasoning_effort"], "low");
  EXPECT_EQ(r.max_tokens, 9);
}

TEST(ResponseParse, FormsOfTheAnswer) {
  ChatRequest r;
  ASSERT_FALSE(parse_responses(
      R"("input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}})", &r));
  EXPECT_EQ(r.format, AnswerFormat::kJsonSchema);
}

TEST(ResponseParse, Refusals) {
  EXPECT_THAT(responses_error(R"("input": [])"), HasSubstr("input is empty"));
  EXPECT_THAT(responses_error(R"("input": [{"type": "item_reference", "id": "x"}])"), HasSubstr("item_reference"));
  EXPECT_THAT(responses_error(R"("input": [{"role": "user", "content": [{"type": "input_image"}]}])"), HasSubstr("input_image"));
  EXPECT_THAT(responses_error(R"("input": "x", "tools": [{"type": "web_search"}])"), HasSubstr("only tools of type 'function'"));
  EXPECT_THAT(responses_error(R"("input": "x", "previous_response_id": "r")"), HasSubstr("nothing is stored"));
  EXPECT_THAT(responses_error(R"("input": "x", "truncation": "auto")"), HasSubstr("truncation"));
  EXPECT_THAT(responses_error(R"("input": "x", "text": {"verbosity": "low"})"), HasSubstr("verbosity"));
  EXPECT_THAT(responses_error(R"("input": "x", "background": true)"), HasSubstr("background"));
}

}  // namespace
}  // namespace mi::server
