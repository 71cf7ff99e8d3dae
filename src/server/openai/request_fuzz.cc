// libFuzzer: request bodies of both endpoints, what is derived of them, and the splitters of tool calls fed with the
// same bytes in pieces.
#include "base/check.h"
#include "server/openai/request.h"
#include "server/openai/tool_calls.h"

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

void check_request(const mi::Json& body) {
  const SamplingDefaults defaults = sampling_defaults(body);
  ChatRequest chat;
  if (!parse_chat(body, defaults, &chat)) {
    MI_CHECK(!chat.messages.empty());
    const mi::Json schema = required_calls_schema(chat.tools, chat.parallel_tool_calls);
    MI_CHECK_EQ(schema["items"]["anyOf"].size(), chat.tools.size());
    for (const Tool& t : chat.tools) MI_CHECK(named_call_schema(t).is_object());
  }
  CompletionRequest completion;
  if (!parse_completion(body, defaults, &completion)) MI_CHECK(!completion.prompts.empty());
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
  return 0;
}
