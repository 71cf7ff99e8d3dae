#pragma once
// Token sequences for calibration from what a user has: plain text, jsonl of {"text"}, {"messages"} (through the
// model's own chat template) or {"ids"}, or the built-in multi-domain text.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/result.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace mi::quant {

struct CalibrationSet {
  std::vector<std::vector<int32_t>> sequences;  // each 1..length tokens
  std::string source;                           // "calib.jsonl", "built-in text", "random ids (no tokenizer)"
  std::string hash;                             // XXH3-128 over the ids
  int64_t tokens = 0;
  int64_t unused = 0;                           // lines, or sequences of a text, beyond `samples`
};

struct CalibrationRequest {
  Path file;  // empty: built in
  int64_t samples = 512, length = 256;
  int64_t vocab = 0;  // ids outside are refused
  // The sequences are drawn from all of the text and come in the order of the draw, the same each time: whatever takes
  // some of them, or every eighth, then has a fair sample of a file that goes from one kind of text to the next. Else
  // the first ones, as they stand.
  bool draw = false;
};

// tokenizer and chat may be null: then only {"ids"} lines work, and the built-in set becomes seeded random ids, which
// is said in `source`. Plain text and the lines of a .jsonl are cut into sequences of `length` tokens.
Result<CalibrationSet> load_calibration(const CalibrationRequest& r, const text::Tokenizer* tokenizer,
                                        const text::ChatTemplate* chat);

// The built-in text: paragraphs of prose, dialogue, code, structured data, mathematics, several languages.
const std::string& builtin_calibration_text();

}  // namespace mi::quant
