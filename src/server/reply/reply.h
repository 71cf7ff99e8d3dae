#pragma once
// What a model writes as an answer, taken apart while it arrives: reasoning, content, tool calls. How a model spells
// them is known from its chat template.
//
// Spellings of calls (NAME, KEY, VALUE stand for text; `{...}` for the JSON object of arguments):
// clang-format off
//   mini        <|call|>{"name": NAME, "arguments": {...}}<|endcall|>
//   hermes      <tool_call>{"name": NAME, "arguments": {...}}</tool_call>                              Hermes, Qwen
//   deepseek    <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{...}\n```<｜tool▁call▁end｜>    V3, R1
//               <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>                             V3.1
//   kimi        <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>  K2
//   qwen3_xml   <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>
//   glm         <tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>    4.5
//   minimax_m2  <minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></minimax:tool_call>
//   minimax_m3  the same with <KEY>VALUE</KEY>, and ]<]minimax[>[ before every tag
//   dsml        <｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>  DeepSeek V3.2
//   harmony     <|channel|>commentary to=functions.NAME<|message|>{...}<|call|>                        gpt-oss
// clang-format on

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "server/openai/request.h"
#include "server/openai/tool_calls.h"
#include "text/tokenizer.h"

namespace mi::server {

// Of calls whose arguments are spelled as tagged values.
struct TagMarks {
  std::vector<std::string> section;      // marks around a list of calls; they leave no text
  std::string call, name_end, call_end;  // call NAME name_end ... call_end
  std::string param, key_end, value;     // param KEY key_end value VALUE ...
  std::string param_end;                 // ... param_end; "{}" in it stands for KEY
  std::string nested;                    // what stands before the tags of a nested value; "": values are not nested
  bool lines = false;                    // one line end on each side of a value is not part of it
};
// Of calls that are a header with the name, and a JSON object.
struct HeadMarks {
  std::vector<std::string> section;
  std::string call, call_end;
};

struct ReplyFormat {
  enum class Calls : uint8_t { kNone, kJson, kHead, kTags, kHarmony };
  std::string name = "none";  // as in the list above
  Calls calls = Calls::kNone;
  CallMarks json;  // kJson
  HeadMarks head;
  TagMarks tags;
  std::string think, think_end;     // around reasoning; "": the model marks none
  std::vector<std::string> tokens;  // marks that may be special tokens and must leave text
};
// template_source may be empty: then only the vocabulary tells.
ReplyFormat detect_format(std::string_view template_source, const text::Tokenizer& t);

// Content and calls. `tools` tells the types of tagged values.
std::unique_ptr<ToolSplitter> split_calls(const ReplyFormat& f, const std::vector<Tool>& tools);
std::unique_ptr<ToolSplitter> split_tags(const TagMarks& marks, const std::vector<Tool>& tools);
std::unique_ptr<ToolSplitter> split_heads(const HeadMarks& marks);
std::unique_ptr<ToolSplitter> split_harmony();
// Reasoning first, then what `rest` makes of the remainder (null: content). open: the prompt already opened it.
std::unique_ptr<ToolSplitter> split_reasoning(std::string begin, std::string end, bool open,
                                              std::unique_ptr<ToolSplitter> rest);

// Does the prompt end within reasoning?
bool opens_reasoning(const ReplyFormat& f, std::string_view prompt);

// Shared by the splitters.
size_t held_back(std::string_view s, std::string_view mark);  // length of the longest end of s that may become mark
void add_piece(std::vector<ToolPiece>* out, ToolPiece::Kind kind, std::string text);
std::string json_text(std::string_view s);  // escaped, without the quotes

}  // namespace mi::server
