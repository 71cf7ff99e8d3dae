#include "server/reply/reply.h"

#include <gtest/gtest.h>

#include "base/utf8.h"
#include "runtime/testing.h"

namespace mi::server {
namespace {

// "text|name(arguments)|{reasoning}..." with neighbours of one kind joined.
std::string shown(const std::vector<ToolPiece>& pieces) {
  std::string s;
  std::optional<ToolPiece::Kind> last;
  const auto closes = [&](ToolPiece::Kind next) {
    if (!last || next == last || (next == ToolPiece::kArguments && last == ToolPiece::kCallBegin)) return;
    if (last == ToolPiece::kArguments || last == ToolPiece::kCallBegin) s += ")";
    if (last == ToolPiece::kReasoning) s += "}";
  };
  for (const ToolPiece& p : pieces) {
    EXPECT_FALSE(p.text.empty());
    closes(p.kind);
    if (p.kind == ToolPiece::kCallBegin)
      s += (last == ToolPiece::kCallBegin ? ")|" : "|") + p.text + "(";
    else if (p.kind == ToolPiece::kReasoning && last != p.kind)
      s += "{" + p.text;
    else if (p.kind == ToolPiece::kContent && last && last != p.kind)
      s += "|" + p.text;
    else
      s += p.text;
    last = p.kind;
  }
  if (last == ToolPiece::kArguments || last == ToolPiece::kCallBegin) s += ")";
  if (last == ToolPiece::kReasoning) s += "}";
  return s;
}

// The characters of the text in groups of `step`, as a model's tokens would bring them.
template <typename Make>
void same_for_every_cut(Make make, const std::string& text, const std::string& expected) {
  std::vector<std::string> characters;
  for (size_t i = 0; i < text.size();) {
    const size_t n = std::max<size_t>(1, utf8_bytes(text, i));
    characters.push_back(text.substr(i, n));
    i += n;
  }
  for (size_t step : {size_t(1), size_t(2), size_t(3), size_t(5), size_t(11), characters.size() + 1}) {
    const std::unique_ptr<ToolSplitter> splitter = make();
    std::vector<ToolPiece> all;
    std::string sent;
    for (size_t i = 0; i < characters.size(); i += step) {
      std::string piece;
      for (size_t k = i; k < std::min(i + step, characters.size()); ++k) piece += characters[k];
      for (ToolPiece& p : splitter->push(piece)) all.push_back(std::move(p));
    }
    for (ToolPiece& p : splitter->finish()) all.push_back(std::move(p));
    EXPECT_EQ(shown(all), expected) << "pieces of " << step;
  }
}

ReplyFormat format_of(const std::string& template_source) {
  static const auto tokenizer = runtime::testing::make_tokenizer(runtime::testing::letter_pieces());
  return detect_format(template_source, *tokenizer);
}

const std::vector<Tool>& tools() {
  static const std::vector<Tool> t = {
      {"weather",
       parse_json(R"({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"},
        "exact": {"type": "boolean"}, "tags": {"type": "array", "items": {"type": "string"}},
        "where": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "string"}}},
        "limit": {"type": ["integer", "null"]}}})",
                  "t")
           .value()},
      {"ping", Json::object()}};
  return t;
}

void calls(const std::string& template_source, const std::string& name, const std::string& text,
           const std::string& expected) {
  const ReplyFormat f = format_of(template_source);
  EXPECT_EQ(f.name, name);
  same_for_every_cut([&] { return split_calls(f, tools()); }, text, expected);
}

TEST(CallFormats, HermesAndMini) {
  calls("<tool_call> </tool_call>", "hermes",
        "Let me see.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": "
        "\"Oslo\"}}\n</tool_call>\n<tool_call>\n"
        "{\"name\": \"ping\", \"arguments\": {}}\n</tool_call>",
        "Let me see.\n|weather({\"city\": \"Oslo\"})|\n|ping({})");
  calls("<|call|> <|endcall|>", "mini", R"(<|call|>{"name": "f", "arguments": {"a": 1}}<|endcall|>)",
        R"(|f({"a": 1}))");
}

TEST(CallFormats, DeepSeek) {
  const char* source = "<｜tool▁call▁begin｜>";
  calls(source, "deepseek",
        "ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"city\": "
        "\"a}<｜tool▁call▁end｜>\"}\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n```json\n{}\n```<｜tool▁call▁end｜><"
        "｜tool▁calls▁end｜>",
        "ok|weather({\"city\": \"a}<｜tool▁call▁end｜>\"})|ping({})");
  calls(source, "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Oslo\"}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>ping<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "|weather({\"city\": \"Oslo\"})|ping({})");
  calls(source, "deepseek", "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Os", "|weather({\"city\": \"Os)");
  calls(source, "deepseek", "a <｜tool▁call▁beg", "a <｜tool▁call▁beg");
}

TEST(CallFormats, Kimi) {
  calls("<|tool_call_begin|>", "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{\"city\": "
        "\"Oslo\"}"
        "<|tool_call_end|><|tool_call_begin|>functions.ping:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_"
        "calls_section_end|>",
        "|weather({\"city\": \"Oslo\"})|ping({})");
}

TEST(CallFormats, QwenXml) {
  const char* source = "<tool_call>\n<function=example><parameter=x>";
  calls(source, "qwen3_xml",
        "Hm.\n<tool_call>\n<function=weather>\n<parameter=city>\nline "
        "\"one\"\n\ttwo</p>\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=ping>\n</"
        "function>\n</tool_call>",
        R"(Hm.
|weather({"city": "line \"one\"\n\ttwo</p>\n", "days": 3, "exact": true})|ping({}))");
  calls(source, "qwen3_xml",
        "<tool_call>\n<function=weather>\n<parameter=city>\n\n</parameter>\n</function>\n</tool_call>",
        R"(|weather({"city": ""}))");
  calls(source, "qwen3_xml", "<tool_call>\n<function=weather>\n<parameter=city>\nOs", R"x(|weather({"city": "Os))x");
}

TEST(CallFormats, Glm) {
  const char* source = "<arg_key>";
  calls(source, "glm",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>漢字 \\ "
        "é</arg_value>\n<arg_key>tags</arg_key>\n<arg_value>[\"a\", "
        "\"b\"]</arg_value>\n</tool_call>",
        R"(|weather({"city": "漢字 \\ é", "tags": ["a","b"]}))");
  calls(source, "glm",
        "a<tool_call>weather<arg_key>city</arg_key><arg_value>12</arg_value></tool_call>b<tool_call>ping</tool_call> ",
        R"(a|weather({"city": "12"})|b|ping({}))");
}

TEST(CallFormats, MiniMaxM2) {
  calls(
      "<minimax:tool_call>", "minimax_m2",
      "<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">San Francisco</parameter>\n<parameter "
      "name=\"limit\">null</parameter>\n</invoke>\n<invoke name=\"ping\">\n</invoke>\n</minimax:tool_call>",
      R"(|weather({"city": "San Francisco", "limit": null})|ping({}))");
}

TEST(CallFormats, MiniMaxM3) {
  const std::string n = "]<]minimax[>[";
  calls("{%- set ns_token = ']<]minimax[>[' %}", "minimax_m3",
        "Here:\n" + n + "<tool_call>\n" + n + "<invoke name=\"weather\">" + n + "<city>New ]<]York" + n + "</city>" +
            n + "<days>2" + n + "</days>" + n + "<where>" + n + "<city>a" + n + "</city>" + n + "<zip>01234" + n +
            "</zip>" + n + "</where>" + n + "<tags>" + n + "<item>x" + n + "</item>" + n + "<item>7" + n + "</item>" +
            n + "</tags>" + n + "</invoke>\n" + n + "<invoke name=\"ping\">" + n + "</invoke>\n" + n + "</tool_call>",
        "Here:\n|weather({\"city\": \"New ]<]York\", \"days\": 2, \"where\": {\"city\":\"a\",\"zip\":\"01234\"}, "
        "\"tags\": "
        "[\"x\",\"7\"]})|ping({})");
}

TEST(CallFormats, Dsml) {
  calls("｜DSML｜", "dsml",
        "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"city\" "
        "string=\"true\">5</｜DSML｜parameter>\n"
        "<｜DSML｜parameter name=\"other\" string=\"false\">{\"a\": "
        "[1]}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        R"(|weather({"city": "5", "other": {"a":[1]}}))");
}

TEST(CallFormats, Harmony) {
  const char* source = "<|channel|> <|message|>";
  calls(source, "harmony",
        "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        "<|constrain|>json<|message|>{\"city\": \"Oslo\"}<|call|>",
        "{Need it.}|weather({\"city\": \"Oslo\"})");
  calls(source, "harmony",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b < c<|return|>",
        "{a}|b < c");
  calls(source, "harmony",
        "<|channel|>commentary<|message|>First this.<|end|><|start|>assistant to=functions.ping<|channel|>commentary"
        "<|message|><|call|>",
        "First this.|ping({})");
  calls(source, "harmony", "no header", "no header");
  calls(source, "harmony", "<|channel|>final<|message|>cut <|en", "cut <|en");
}

TEST(CallFormats, KeysTwiceAndValuesOfOtherTypes) {
  calls("<arg_key>", "glm",
        "<tool_call>weather\n<arg_key>days</arg_key><arg_value>soon</arg_value><arg_key>days</arg_key><arg_value>4</"
        "arg_value>"
        "<arg_key>new</arg_key><arg_value>1.5</arg_value></tool_call>",
        R"(|weather({"days": "soon", "new": 1.5}))");
}

void reasoning(const std::string& text, const std::string& expected, bool open = false) {
  same_for_every_cut(
      [&] { return split_reasoning("<think>", "</think>", open, split_calls(format_of("<arg_key>"), tools())); }, text,
      expected);
}

TEST(Reasoning, ComesFirstOrNotAtAll) {
  reasoning("<think>\nlet me see\n</think>\n\nYes.", "{let me see}|Yes.");
  reasoning("let me see\n</think>\n\nYes.", "{let me see}|Yes.", true);
  reasoning("Yes <think>no</think>", "Yes <think>no</think>");
  reasoning("</think>Yes", "Yes");
  reasoning("\n<think></think>Yes", "Yes");
  reasoning("<think>cut off </thi", "{cut off </thi}");
  reasoning("<thin", "<thin");
  reasoning("<think>call</think><tool_call>ping</tool_call>", "{call}|ping({})");
}

TEST(Reasoning, ThePromptMayOpenIt) {
  const ReplyFormat f = format_of("{% if x %}<think>{% endif %}</think><tool_call></tool_call>");
  EXPECT_EQ(f.name, "hermes");
  EXPECT_TRUE(opens_reasoning(f, "<|im_start|>assistant\n<think>\n"));
  EXPECT_FALSE(opens_reasoning(f, "<|im_start|>assistant\n<think>\n\n</think>\n\n"));
  EXPECT_EQ(format_of("]<]minimax[>[ </mm:think>").think, "<mm:think>");
  EXPECT_TRUE(format_of("plain").think.empty());
  EXPECT_EQ(format_of("plain").calls, ReplyFormat::Calls::kNone);
}

}  // namespace
}  // namespace mi::server
