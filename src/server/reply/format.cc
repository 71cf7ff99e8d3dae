#include "server/reply/reply.h"

namespace mi::server {
namespace {

using Calls = ReplyFormat::Calls;

ReplyFormat tags(std::string name, TagMarks marks, std::vector<std::string> tokens) {
  ReplyFormat f;
  f.name = std::move(name);
  f.calls = Calls::kTags;
  f.tags = std::move(marks);
  f.tokens = std::move(tokens);
  return f;
}
ReplyFormat heads(std::string name, HeadMarks marks, std::vector<std::string> tokens) {
  ReplyFormat f;
  f.name = std::move(name);
  f.calls = Calls::kHead;
  f.head = std::move(marks);
  f.tokens = std::move(tokens);
  return f;
}

ReplyFormat invoke(std::string name, const std::string& open, const std::string& close, const std::string& section,
                   std::vector<std::string> tokens) {
  TagMarks m;
  m.section = {open + section + ">", close + section + ">"};
  m.call = open + "invoke name=\"";
  m.name_end = "\">";
  m.call_end = close + "invoke>";
  m.param = open + "parameter name=\"";
  m.key_end = ">";
  m.param_end = close + "parameter>";
  return tags(std::move(name), std::move(m), std::move(tokens));
}

// From the most particular marks to the most common ones: templates mention marks of their ancestors.
ReplyFormat calls_of(std::string_view source, const text::Tokenizer& t) {
  const auto has = [&](std::string_view mark) { return source.find(mark) != std::string_view::npos; };
  if (has("<|channel|>") && has("<|message|>")) {
    ReplyFormat f;
    f.name = "harmony";
    f.calls = Calls::kHarmony;
    f.tokens = {"<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"};
    return f;
  }
  if (const std::string ns = "]<]minimax[>["; has(ns)) {
    ReplyFormat f = invoke("minimax_m3", ns + "<", ns + "</", "tool_call", {ns, "<tool_call>", "</tool_call>"});
    f.tags.param = ns + "<";
    f.tags.key_end = ">";
    f.tags.param_end = ns + "</{}>";
    f.tags.nested = ns;
    return f;
  }
  if (has("<minimax:tool_call>"))
    return invoke("minimax_m2", "<", "</", "minimax:tool_call", {"<minimax:tool_call>", "</minimax:tool_call>"});
  if (has("｜DSML｜")) return invoke("dsml", "<｜DSML｜", "</｜DSML｜", "function_calls", {"｜DSML｜"});
  if (has("<｜tool▁call▁begin｜>"))
    return heads("deepseek",
                 {{"<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"}, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"},
                 {"<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
                  "<｜tool▁sep｜>"});
  if (has("<|tool_call_begin|>"))
    return heads(
        "kimi",
        {{"<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"}, "<|tool_call_begin|>", "<|tool_call_end|>"},
        {"<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
         "<|tool_call_argument_begin|>"});
  if (has("<arg_key>")) {
    TagMarks m;
    m.call = "<tool_call>";
    m.name_end = "\n";
    m.call_end = "</tool_call>";
    m.param = "<arg_key>";
    m.key_end = "</arg_key>";
    m.value = "<arg_value>";
    m.param_end = "</arg_value>";
    return tags("glm", std::move(m),
                {"<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"});
  }
  if (has("<function=") && has("<parameter=")) {
    TagMarks m;
    m.section = {"<tool_call>", "</tool_call>"};
    m.call = "<function=";
    m.name_end = ">";
    m.call_end = "</function>";
    m.param = "<parameter=";
    m.key_end = ">";
    m.param_end = "</parameter>";
    m.lines = true;
    return tags("qwen3_xml", std::move(m), {"<tool_call>", "</tool_call>"});
  }
  ReplyFormat f;
  if (has("<|call|>") && has("<|endcall|>"))
    f.json = {"<|call|>", "<|endcall|>"};
  else if (has("<tool_call>") && has("</tool_call>"))
    f.json = {"<tool_call>", "</tool_call>"};
  else
    f.json = call_marks(t);
  if (f.json.begin.empty()) return f;
  f.calls = Calls::kJson;
  f.name = f.json.begin == "<|call|>" ? "mini" : "hermes";
  f.tokens = {f.json.begin, f.json.end};
  return f;
}

}  // namespace

ReplyFormat detect_format(std::string_view source, const text::Tokenizer& t) {
  ReplyFormat f = calls_of(source, t);
  if (f.calls == Calls::kHarmony) return f;  // its channels tell
  for (const auto& [begin, end] : {std::pair{"<mm:think>", "</mm:think>"}, std::pair{"<think>", "</think>"}}) {
    if (source.find(end) == std::string_view::npos) continue;
    f.think = begin;
    f.think_end = end;
    f.tokens.insert(f.tokens.end(), {begin, end});
    break;
  }
  return f;
}

std::unique_ptr<ToolSplitter> split_calls(const ReplyFormat& f, const std::vector<Tool>& tools) {
  switch (f.calls) {
    case Calls::kNone:
      return nullptr;
    case Calls::kJson:
      return split_marked(f.json);
    case Calls::kHead:
      return split_heads(f.head);
    case Calls::kTags:
      return split_tags(f.tags, tools);
    case Calls::kHarmony:
      return split_harmony();
  }
  return nullptr;
}

bool opens_reasoning(const ReplyFormat& f, std::string_view prompt) {
  if (f.think.empty()) return false;
  while (!prompt.empty() && isspace(static_cast<unsigned char>(prompt.back()))) prompt.remove_suffix(1);
  return prompt.size() >= f.think.size() && prompt.substr(prompt.size() - f.think.size()) == f.think;
}

size_t held_back(std::string_view s, std::string_view mark) {
  for (size_t n = std::min(s.size(), mark.size() - 1); n > 0; --n)
    if (s.substr(s.size() - n) == mark.substr(0, n)) return n;
  return 0;
}

void add_piece(std::vector<ToolPiece>* out, ToolPiece::Kind kind, std::string text) {
  if (text.empty()) return;
  if (!out->empty() && out->back().kind == kind && kind != ToolPiece::kCallBegin)
    out->back().text += text;
  else
    out->push_back({kind, std::move(text)});
}

std::string json_text(std::string_view s) {
  const std::string quoted = dump_json(Json(std::string(s)));
  return quoted.substr(1, quoted.size() - 2);
}

}  // namespace mi::server
