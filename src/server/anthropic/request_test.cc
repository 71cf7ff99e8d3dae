#include "server/anthropic/request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace mi::server {
namespace {

using testing::HasSubstr;

std::optional<ApiError> parse_anthropic(const std::string& fields, ChatRequest* r) {
  return parse_message(parse_json(R"({"model": "m", "max_tokens": 7, )" + fields + "}", "b").value(), {}, r);
}
std::string error(const std::string& fields) {
  ChatRequest r;
  const auto e = parse_anthropic(fields, &r);
  return e ? e->message : "accepted";
}

TEST(MessageParse, AConversationWithToolsBecomesAChat) {
  ChatRequest r;
  const auto e = parse_anthropic(R"("system": [{"type": "text", "text": "be kind"}],
    "messages": [{"role": "user", "content": "weather?"},
      {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "let me see"},
        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}]},
      {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
        {"type": "text", "text": "and Rome?", "cache_control": {"type": "ephemeral"}}]}],
    "tools": [{"name": "weather", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": true}, "stop_sequences": ["x"], "thinking": {"type": "disabled"})",
                       &r);
  ASSERT_FALSE(e) << e->message;
  EXPECT_EQ(r.messages,
            parse_json(R"([{"role": "system", "content": "be kind"}, {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": "let me see", "reasoning_content": "hm",
     "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]},
    {"role": "tool", "content": "rain", "tool_call_id": "t1"}, {"role": "user", "content": "and Rome?"}])",
                       "m")
                .value());
  EXPECT_EQ(r.tool_choice, ToolChoice::kRequired);
  EXPECT_FALSE(r.parallel_tool_calls);
  EXPECT_EQ(r.max_tokens, 7);
  EXPECT_THAT(r.stop, testing::ElementsAre("x"));
  EXPECT_EQ(r.template_kwargs["enable_thinking"], false);
  EXPECT_EQ(r.tools_json[0]["function"]["parameters"]["type"], "object");
}

TEST(MessageParse, Refusals) {
  EXPECT_THAT(error(R"("messages": [])"), HasSubstr("messages is empty"));
  EXPECT_THAT(error(R"("messages": [{"role": "user", "content": [{"type": "image"}]}])"), HasSubstr("'image'"));
  EXPECT_THAT(error(R"("messages": [{"role": "tool", "content": "x"}])"), HasSubstr("'tool'"));
  EXPECT_THAT(
      error(R"("messages": [{"role": "user", "content": "x"}], "tools": [{"type": "web_search_1", "name": "w"}])"),
      HasSubstr("client runs"));
  EXPECT_THAT(error(R"("messages": [{"role": "user", "content": "x"}], "tool_choice": {"type": "any"})"),
              HasSubstr("no tools"));
  EXPECT_THAT(error(R"("messages": [{"role": "user", "content": "x"}], "mcp_servers": [])"),
              HasSubstr("mcp_servers is not supported"));
  EXPECT_THAT(error(R"("messages": [{"role": "user", "content": "x"}], "presence_penalty": 1)"),
              HasSubstr("unknown field"));
}

TEST(MessageParse, ErrorsHaveTheirOwnShape) {
  EXPECT_EQ(anthropic_error_json({429, "later", "rate_limit_error", {}, {}}),
            R"({"type":"error","error":{"type":"rate_limit_error","message":"later"}})");
}

}  // namespace
}  // namespace mi::server
