#include "server/openai/tool_calls.h"

#include <gtest/gtest.h>

namespace mi::server {
namespace {

// "text|name(arguments)|..." with arguments joined.
std::string calls_shown(const std::vector<ToolPiece>& pieces) {
  std::string s;
  bool in_call = false;
  for (const ToolPiece& p : pieces) {
    if (p.kind == ToolPiece::kCallBegin) {
      s += std::string(in_call ? ")" : "") + "|" + p.text + "(";
      in_call = true;
    } else if (p.kind == ToolPiece::kArguments) {
      s += p.text;
    } else {
      s += (in_call ? ")|" : "") + p.text;
      in_call = false;
    }
  }
  return s + (in_call ? ")" : "");
}

template <typename Make>
void same_for_every_byte_cut(Make make, const std::string& text, const std::string& expected) {
  for (size_t step = 1; step <= text.size() + 1; step = step < 6 ? step + 1 : text.size() + 1 + (step > text.size())) {
    const auto splitter = make();
    std::vector<ToolPiece> all;
    for (size_t i = 0; i < text.size(); i += step)
      for (ToolPiece& p : splitter->push(text.substr(i, step))) all.push_back(std::move(p));
    for (ToolPiece& p : splitter->finish()) all.push_back(std::move(p));
    EXPECT_EQ(calls_shown(all), expected) << "pieces of " << step;
    if (step > text.size()) break;
  }
}

const CallMarks kMarks{"<|call|>", "<|endcall|>"};
void marked(const std::string& text, const std::string& expected) {
  same_for_every_byte_cut([] { return split_marked(kMarks); }, text, expected);
}

TEST(MarkedCalls, OneTwoAndTextAround) {
  marked("hello", "hello");
  marked(R"(<|call|>{"name": "f", "arguments": {"a": 1}}<|endcall|>)", R"(|f({"a": 1}))");
  marked(
      R"(so: <|call|>{"name": "f", "arguments": {}}<|endcall|><|call|>{"name": "g", "arguments": {"b": [1, {"c": "}<|endcall|>"}]}}<|endcall|> done)",
      R"(so: |f({})|g({"b": [1, {"c": "}<|endcall|>"}]})| done)");
}

TEST(MarkedCalls, OrderOfKeysAndOddForms) {
  marked(R"(<|call|>{"arguments": {"a": "\"x\\"}, "name": "f"}<|endcall|>)", R"(|f({"a": "\"x\\"}))");
  marked(R"(<|call|>{"name": "f"}<|endcall|>)", "|f({})");
  marked(R"(<|call|>{"id": 7, "name": "f", "parameters": {"x": null}}<|endcall|>)", R"(|f({"x": null}))");
  marked(R"(<|call|>{"name": "f", "arguments": "{\"a\": 1}"}<|endcall|>)", R"(|f({"a": 1}))");
}

TEST(MarkedCalls, CutAndBrokenOnes) {
  marked(R"(<|call|>{"name": "f", "arguments": {"a": "lo)", R"(|f({"a": "lo))");
  marked("a <|cal", "a <|cal");
  marked("<|call|>no call<|endcall|>", "<|call|>no call<|endcall|>");
  marked(R"(<|call|>{"name": 5)", R"(<|call|>{"name": 5)");
}

TEST(ListAndBare, Calls) {
  same_for_every_byte_cut([] { return split_list(); },
                     R"([{"name": "f", "arguments": {"a": "]}"}}, {"name": "g", "arguments": {}}])",
                     R"(|f({"a": "]}"})|g({}))");
  same_for_every_byte_cut([] { return split_bare("f"); }, R"({"a": 1})", R"(|f({"a": 1}))");
  same_for_every_byte_cut([] { return split_bare("f"); }, "", "|f()");
}

TEST(Schemas, ReferencesMoveWithTheirTool) {
  Tool t{
      "f",
      parse_json(
          R"({"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "string"}}})", "t")
          .value()};
  const Json s = required_calls_schema({t, {"g", Json::object()}}, false);
  EXPECT_EQ(s["maxItems"], 1);
  EXPECT_EQ(s["$defs"]["tool0_x"]["type"], "string");
  EXPECT_EQ(s["items"]["anyOf"][0]["properties"]["arguments"]["properties"]["a"]["$ref"], "#/$defs/tool0_x");
  EXPECT_EQ(s["items"]["anyOf"][1]["properties"]["arguments"]["type"], "object");
}

}  // namespace
}  // namespace mi::server
