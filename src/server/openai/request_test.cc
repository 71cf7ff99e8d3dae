#include "server/openai/request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/openai/render.h"

namespace mi::server {
namespace {

using testing::HasSubstr;

std::optional<ApiError> chat_error(const std::string& fields, ChatRequest* out = nullptr) {
  ChatRequest r;
  const Json body =
      parse_json(R"({"model": "m", "messages": [{"role": "user", "content": "x"}])" + fields + "}", "b").value();
  return parse_chat(body, {}, out ? out : &r);
}
std::string chat_message(const std::string& fields) {
  const auto e = chat_error(fields);
  return e ? e->message : "accepted";
}

TEST(ChatParse, FieldsArrive) {
  ChatRequest r;
  const auto e = chat_error(
      R"(, "temperature": 0.5, "top_k": 7, "stop": ["a", "b"], "seed": -1, "n": 3, "logit_bias": {"5": -100}, "max_completion_tokens": 9,
      "logprobs": true, "top_logprobs": 4, "stream": true, "stream_options": {"include_usage": true}, "user": "u", "metadata": {})",
      &r);
  ASSERT_FALSE(e) << e->message;
  EXPECT_EQ(r.sampling.temperature, 0.5);
  EXPECT_EQ(r.sampling.top_k, 7);
  EXPECT_EQ(*r.sampling.seed, ~uint64_t(0));
  EXPECT_EQ(r.sampling.logprobs, 4);
  EXPECT_EQ(r.n, 3);
  EXPECT_EQ(r.max_tokens, 9);
  EXPECT_THAT(r.stop, testing::ElementsAre("a", "b"));
  EXPECT_TRUE(r.stream && r.include_usage);
}

TEST(ChatParse, RefusalsNameTheField) {
  EXPECT_THAT(chat_message(R"(, "temprature": 1)"), HasSubstr("did you mean 'temperature'"));
  EXPECT_THAT(chat_message(R"(, "temperature": "hot")"), HasSubstr("temperature must be a number"));
  EXPECT_THAT(chat_message(R"(, "top_p": 1.5)"), HasSubstr("top_p"));
  EXPECT_THAT(chat_message(R"(, "n": 0)"), HasSubstr("n is 0"));
  EXPECT_THAT(chat_message(R"(, "n": 99999999999999999999)"), HasSubstr("n "));
  EXPECT_THAT(chat_message(R"(, "top_logprobs": 3)"), HasSubstr("logprobs"));
  EXPECT_THAT(chat_message(R"(, "logit_bias": {"x": 1})"), HasSubstr("'x'"));
  EXPECT_THAT(chat_message(R"(, "stop": "")"), HasSubstr("empty"));
  EXPECT_THAT(chat_message(R"(, "tool_choice": "required")"), HasSubstr("no tools"));
  EXPECT_THAT(chat_message(R"(, "response_format": {"type": "xml"})"), HasSubstr("response_format"));
  EXPECT_EQ(chat_error(R"(, "top_p": 2)")->param, "top_p");
}

TEST(ChatParse, AMisspelledFieldIsNamedBesideTheOneThatIsMissing) {
  ChatRequest r;
  const auto e = parse_chat(parse_json(R"({"model": "m", "messagez": [{"role": "user", "content": "x"}]})", "b").value(), {}, &r);
  ASSERT_TRUE(e);
  EXPECT_EQ(e->message, "unknown field 'messagez' (did you mean 'messages'?); messages is missing");
  EXPECT_EQ(*e->param, "messagez");
  EXPECT_EQ(parse_chat(Json{{"model", "m"}}, {}, &r)->message, "messages is missing");
}

TEST(ChatParse, Messages) {
  const auto parse = [](const std::string& messages, ChatRequest* r) {
    return parse_chat(parse_json(R"({"model": "m", "messages": )" + messages + "}", "b").value(), {}, r);
  };
  ChatRequest r;
  ASSERT_FALSE(
      parse(R"([{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
      {"role": "assistant", "content": null, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
      {"role": "tool", "tool_call_id": "c", "content": "y"}])",
            &r));
  EXPECT_EQ(r.messages[0]["role"], "system");
  EXPECT_EQ(r.messages[0]["content"], "a\nb");
  EXPECT_EQ(r.messages[1]["tool_calls"][0]["function"]["arguments"]["x"], 1);
  for (const char* bad :
       {R"([])", R"("x")", R"([5])", R"([{}])", R"([{"role": "wizard", "content": "x"}])", R"([{"role": "user"}])",
        R"([{"role": "user", "content": 4}])", R"([{"role": "user", "content": [{"type": "image_url"}]}])",
        R"([{"role": "user", "content": "x", "contnet": "y"}])"}) {
    ChatRequest other;
    EXPECT_TRUE(parse(bad, &other)) << bad;
  }
}

TEST(ChatParse, AnswersOfAForm) {
  ChatRequest r;
  ASSERT_FALSE(chat_error(R"(, "response_format": {"type": "regex", "regex": "[0-9]+"})", &r));
  EXPECT_EQ(r.format, AnswerFormat::kRegex);
  EXPECT_EQ(r.grammar, "[0-9]+");
  ASSERT_FALSE(chat_error(R"(, "response_format": {"type": "grammar", "grammar": "start: \"a\""})", &r));
  EXPECT_EQ(r.format, AnswerFormat::kLark);
  EXPECT_THAT(chat_message(R"(, "response_format": {"type": "grammar"})"), HasSubstr("response_format.grammar"));
}

TEST(ChatParse, EffortReachesTheTemplate) {
  ChatRequest r;
  ASSERT_FALSE(chat_error(R"(, "reasoning_effort": "none", "chat_template_kwargs": {"a": 1})", &r));
  EXPECT_EQ(r.template_kwargs,
            parse_json(R"({"a": 1, "reasoning_effort": "none", "enable_thinking": false})", "t").value());
  EXPECT_THAT(chat_message(R"(, "reasoning_effort": "heroic")"), HasSubstr("reasoning_effort"));
}

TEST(CompletionParse, Prompts) {
  const auto parse = [](const std::string& fields, CompletionRequest* r) {
    return parse_completion(parse_json(R"({"model": "m", )" + fields + "}", "b").value(), {}, r);
  };
  CompletionRequest r;
  ASSERT_FALSE(parse(R"("prompt": ["a", [1, 2]], "max_tokens": 0, "echo": true, "logprobs": 1)", &r));
  EXPECT_EQ(r.prompts.size(), 2u);
  for (const char* bad : {R"("prompt": "")", R"("prompt": [])", R"("prompt": [[]])", R"("prompt": [1, "a"])",
                          R"("prompt": [1.5])", R"("prompt": [-1])", R"("prompt": [1099511627776])",
                          R"("prompt": {"a": 1})", R"("prompt": 7)", R"("prompt": null)", R"("max_tokens": 5)",
                          R"("prompt": "x", "max_tokens": 0)", R"("prompt": "x", "suffix": "y")"}) {
    CompletionRequest other;
    EXPECT_TRUE(parse(bad, &other)) << bad;
  }
}

TEST(Defaults, ComeFromTheModel) {
  EXPECT_EQ(sampling_defaults(parse_json(R"({"do_sample": false, "temperature": 0.7})", "g").value()).temperature, 0.0);
  EXPECT_EQ(sampling_defaults(parse_json(R"({"temperature": 0.7, "top_p": 0.9, "top_k": 20})", "g").value()).top_k, 20);
  EXPECT_EQ(sampling_defaults(Json::object()).temperature, 1.0);
  EXPECT_EQ(sampling_defaults(parse_json(R"({"top_k": 1e300})", "g").value()).top_k, INT32_MAX);
}

TEST(Render, TokenNamesAndCharacters) {
  EXPECT_EQ(token_name("abc"), "abc");
  EXPECT_EQ(token_name("\xe6\xbc"), "bytes:\\xe6\\xbc");
  EXPECT_EQ(clean_utf8("a\xff\xe6\xbc\xa2"), "a\xef\xbf\xbd\xe6\xbc\xa2");
  EXPECT_EQ(clean_utf8("\xed\xa0\x80").size(), 9u);  // a surrogate is three broken bytes
  EXPECT_EQ(count_characters("a\xe6\xbc\xa2"), 2);
}

}  // namespace
}  // namespace mi::server
