#pragma once
// Task accuracy and perplexity of an engine on a file of checkable items.
//
// eval.jsonl, one item a line: {"group", "messages" [, "tools"], "answer", "check": "exact"|"contains"|"json"}. The
// prompt is the model's chat template with the generation prompt; the answer is greedy. exact: the text equals the
// answer; contains: it holds it; json: both parse and are equal. Before checking, added tokens that stayed in the text
// (tool call marks) are removed. A text file beside it (text_ppl.txt) is scored block by block (blocks are separated by
// an empty line) after the begin token.

#include <map>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/json.h"
#include "base/result.h"
#include "tools/session.h"

namespace mi::tools {

struct EvalOptions {
  Path data;          // eval.jsonl
  Path text;          // empty: text_ppl.txt beside data, if there
  int64_t limit = 0;  // items per group, 0: all
  std::vector<std::string> only_groups;  // empty: all
  bool score_text = true;
  int64_t max_tokens = 96;
  Path reference;  // results with greedy answers to compare with ("greedy": [{prompt_ids, output_ids}]); may be empty
};

struct GroupResult {
  int64_t items = 0, right = 0;
  double accuracy() const { return items ? double(right) / double(items) : 0; }
};

struct Divergence {           // a greedy answer that differs from the reference
  int64_t index = 0, at = 0;  // item, token
  int32_t expected = 0, found = 0;
  double margin = 0;  // found's logprob minus expected's, by this engine: a near tie is close to 0
};

struct EvalResult {
  std::map<std::string, GroupResult> groups;
  std::vector<std::string> group_order;
  std::vector<std::vector<int32_t>> prompts, answers;  // of the items, in the file's order
  std::vector<std::string> item_groups;
  double text_nll_per_token = 0;
  int64_t text_tokens = 0;
  int64_t greedy_compared = 0;
  std::vector<Divergence> divergences;
  double seconds = 0;
  int64_t generated_tokens = 0;
};

// Refuses a file of items that run_eval() would refuse, without an engine. tokenizer: the folder of the MIR or engine.
Status check_eval(const Path& tokenizer, const EvalOptions& o);
Result<EvalResult> run_eval(const Session& session, const EvalOptions& o);
Json eval_json(const EvalResult& r);
// One column per result: "float" and "int8" side by side.
std::string eval_table(const std::vector<std::pair<std::string, EvalResult>>& columns);

// exact, contains or json (see above); `output` without surrounding blanks.
bool answer_is_right(const std::string& check, const Json& answer, const std::string& output);

}  // namespace mi::tools
