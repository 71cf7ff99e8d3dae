#pragma once
// Tool calls in generated text: finding them while the text arrives, and grammars that force them. Here those that are
// JSON; ../reply has the other spellings.
//
// A call is the JSON object {"name": N, "arguments": {...}} ("parameters" is accepted too), in one of three
// surroundings:
//   marked   between a model's own marks, anywhere in the text: <|call|> ... <|endcall|>, <tool_call> ... </tool_call>
//   list     the whole text is a JSON list of calls (tool_choice "required", by grammar)
//   bare     the whole text is one call's arguments (a named tool_choice, by grammar)
// What was sent of a call is never taken back, so arguments are passed on only from the place where they surely are
// JSON.

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "server/openai/request.h"
#include "text/tokenizer.h"

namespace mi::server {

struct CallMarks {
  std::string begin, end;
};
// The marks that this model's vocabulary holds; empty strings when none is known.
CallMarks call_marks(const text::Tokenizer& t);

struct ToolPiece {
  enum Kind : uint8_t { kContent, kCallBegin, kArguments, kReasoning } kind;
  std::string text;  // content, the function's name, a piece of the arguments, or of reasoning
};

// Splits text into content and calls as it comes. Pieces joined do not depend on how the text was cut.
class ToolSplitter {
 public:
  virtual ~ToolSplitter() = default;
  virtual std::vector<ToolPiece> push(std::string_view text) = 0;
  virtual std::vector<ToolPiece> finish() = 0;  // what was held back
};
std::unique_ptr<ToolSplitter> split_marked(CallMarks marks);
std::unique_ptr<ToolSplitter> split_list();
std::unique_ptr<ToolSplitter> split_bare(std::string name);

// Schemas for text::ConstraintFactory::json_schema.
Json named_call_schema(const Tool& tool);  // its arguments
Json required_calls_schema(const std::vector<Tool>& tools, bool parallel);
// A Lark grammar for a model that may write anything, but between the marks (two tokens) only calls that obey the
// schemas of the strict tools.
std::string free_calls_grammar(const std::vector<Tool>& tools, bool parallel, int32_t begin, int32_t end);

}  // namespace mi::server
