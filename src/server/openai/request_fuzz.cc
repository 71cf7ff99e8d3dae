// libFuzzer: request bodies of every route, what is derived of them, and the splitters of answers fed with the same
// bytes in pieces.
#include <algorithm>

#include "base/check.h"
#include "base/utf8.h"
#include "server/anthropic/request.h"
#include "server/openai/request.h"
#include "server/reply/reply.h"
#include "server/responses/request.h"

namespace {

using namespace mi::server;

// The pieces joined: "text|name|" and arguments as they are.
std::string split(ToolSplitter& splitter, std::string_view text, size_t step) {
  std::string out;
  const auto add = [&](const std::vector<ToolPiece>& pieces) {
    for (const ToolPiece& p : pieces) out += p.kind == ToolPiece::kCallBegin ? "|" + p.text + "|" : p.text;
  };
  for (size_t i = 0; i < text.size(); i += step) add(splitter.push(text.substr(i, step)));
  add(splitter.finish());
  return out;
}

int64_t characters(std::string_view s) {
  return std::count_if(s.begin(), s.end(), [](unsigned char c) { return (c & 0xc0) != 0x80; });
}

// A refusal has a reason, and repeats no more of the request than one can read. True if there is none.
bool accepted(const std::optional<ApiError>& e) {
  if (!e) return true;
  MI_CHECK(e->status == 400 && !e->message.empty());
  MI_CHECK(!e->param || (characters(*e->param) <= 64 && mi::clean_utf8(*e->param) == *e->param), "param {}", *e->param);
  for (const std::string& sent : {error_json(*e), anthropic_error_json(*e)})
    MI_CHECK(characters(mi::parse_json(sent, "error").value()["error"]["message"].get<std::string>()) <= 1000, "{}", sent);
  return false;
}

void check_request(const mi::Json& body) {
  const SamplingDefaults defaults = sampling_defaults(body);
  ChatRequest chat;
  if (accepted(parse_chat(body, defaults, &chat))) {
    MI_CHECK(!chat.messages.empty());
    const mi::Json schema = required_calls_schema(chat.tools, chat.parallel_tool_calls);
    MI_CHECK_EQ(schema["items"]["anyOf"].size(), chat.tools.size());
    for (const Tool& t : chat.tools) MI_CHECK(named_call_schema(t).is_object());
  }
  CompletionRequest completion;
  if (accepted(parse_completion(body, defaults, &completion))) MI_CHECK(!completion.prompts.empty());
  ChatRequest message, counted, response, templated;
  ResponseRequest told;
  if (accepted(parse_message(body, defaults, &message))) MI_CHECK(!message.messages.empty());
  if (accepted(parse_count_tokens(body, &counted))) MI_CHECK(!counted.messages.empty());
  if (accepted(parse_response(body, defaults, &response, &told))) MI_CHECK(!response.messages.empty());
  if (accepted(parse_apply_template(body, &templated))) MI_CHECK(!templated.messages.empty());
  EmbeddingRequest embedding;
  if (accepted(parse_embedding(body, &embedding))) MI_CHECK(!embedding.inputs.empty());
  TokenizeRequest tokenize;
  accepted(parse_tokenize(body, &tokenize));
  DetokenizeRequest detokenize;
  accepted(parse_detokenize(body, &detokenize));
}

class NoTokens : public mi::text::Tokenizer {
  int64_t vocab() const override { return 0; }
  mi::Result<std::vector<int32_t>> encode(std::string_view, bool) const override { return std::vector<int32_t>(); }
  mi::Result<std::vector<int32_t>> encode_mixed(std::string_view, std::span<const Range>) const override {
    return std::vector<int32_t>();
  }
  mi::Result<std::string> decode(std::span<const int32_t>, bool) const override { return std::string(); }
  std::string_view token_bytes(int32_t) const override { return {}; }
  bool is_special(int32_t) const override { return false; }
  int32_t id_of(std::string_view) const override { return -1; }
};

const std::vector<ReplyFormat>& formats() {
  static const std::vector<ReplyFormat> all = [] {
    std::vector<ReplyFormat> made;
    for (const char* source : {"<|channel|><|message|>", "]<]minimax[>[", "<minimax:tool_call>", "｜DSML｜",
                               "<｜tool▁call▁begin｜>", "<|tool_call_begin|>", "<arg_key>", "<function=<parameter="})
      made.push_back(detect_format(source, NoTokens()));
    return made;
  }();
  return all;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  auto parsed = parse_body(text);
  if (const auto* body = std::get_if<mi::Json>(&parsed)) check_request(*body);
  for (auto make : {+[] {
                      return split_marked({"<tool_call>", "</tool_call>"});
                    },
                    +[] { return split_list(); }, +[] { return split_bare("f"); }})
    MI_CHECK_EQ(split(*make(), text, 1), split(*make(), text, 7));
  // A tokenizer gives whole characters; values become JSON strings, where a broken one would be replaced.
  const std::string clean = mi::clean_utf8(text);
  const std::vector<Tool> tools = {{"f", mi::Json{{"properties", {{"s", {{"type", "string"}}}}}}}};
  for (const ReplyFormat& f : formats()) {
    const auto make = [&] { return split_reasoning("<think>", "</think>", false, split_calls(f, tools)); };
    MI_CHECK_EQ(split(*make(), clean, 1), split(*make(), clean, 7));
  }
  return 0;
}
