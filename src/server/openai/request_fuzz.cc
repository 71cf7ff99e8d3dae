// libFuzzer: request bodies of both endpoints, and the splitter of tool calls fed with the same bytes in pieces.
#include "base/check.h"
#include "server/openai/request.h"
#include "server/openai/tool_calls.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  auto parsed = mi::server::parse_body(text);
  if (const auto* body = std::get_if<mi::Json>(&parsed)) {
    mi::server::ChatRequest chat;
    mi::server::CompletionRequest completion;
    (void)mi::server::parse_chat(*body, {}, &chat);
    (void)mi::server::parse_completion(*body, {}, &completion);
  }
  std::string joined[2];
  for (size_t step : {size_t(1), size_t(7)}) {
    const auto splitter = mi::server::split_marked({"<tool_call>", "</tool_call>"});
    std::string& out = joined[step == 7];
    for (size_t i = 0; i < size; i += step)
      for (const auto& p : splitter->push(std::string_view(text).substr(i, step))) out += char('0' + p.kind) == '1' ? "|" + p.text + "|" : p.text;
    for (const auto& p : splitter->finish()) out += p.text;
  }
  MI_CHECK(joined[0] == joined[1], "pieces of one and seven differ");
  return 0;
}
