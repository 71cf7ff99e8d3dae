#include "tools/eval.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <sstream>

#include "base/in_file.h"
#include "runtime/generate.h"
#include "text/messages.h"

namespace mi::tools {
namespace {

struct Item {
  std::string group, check;
  Json answer;
  std::vector<int32_t> prompt;
};

std::string trimmed(const std::string& s) {
  const size_t a = s.find_first_not_of(" \t\r\n");
  return a == std::string::npos ? "" : s.substr(a, s.find_last_not_of(" \t\r\n") - a + 1);
}

Result<std::vector<Item>> load_items(const text::ModelText& t, const EvalOptions& o) {
  if (!t.tokenizer) return bad_input("this model has no tokenizer: export it with its tokenizer.json to evaluate it");
  if (!t.chat) return bad_input("this model has no chat template, which the items' messages need");
  MI_TRY(const std::string content, read_file(o.data));
  std::vector<Item> items;
  std::map<std::string, int64_t> seen;
  std::istringstream lines(content);
  std::string line;
  for (int64_t n = 1; std::getline(lines, line); ++n) {
    if (trimmed(line).empty()) continue;
    const std::string what = fmt::format("{} line {}", o.data.string(), n);
    MI_TRY(const Json j, parse_json(line, what));
    if (!j.is_object() || !j.contains("messages") || !j.contains("answer"))
      return bad_input("{}: expected an object with group, messages and answer", what);
    Item item;
    MI_TRY(item.group, json_get<std::string>(j, "group", what));
    MI_TRY(item.check, json_get_or<std::string>(j, "check", "exact", what));
    if (item.check != "exact" && item.check != "contains" && item.check != "json")
      return bad_input("{}: check must be exact, contains or json", what);
    item.answer = j["answer"];
    if (!o.only_groups.empty() && std::find(o.only_groups.begin(), o.only_groups.end(), item.group) == o.only_groups.end())
      continue;
    if (o.limit > 0 && ++seen[item.group] > o.limit) continue;
    MI_TRY_VOID(text::check_messages(j, what));
    const std::string tools = j.contains("tools") ? dump_json(j["tools"]) : "";
    MI_TRY(const text::Rendered rendered,
           in_file(t.chat->render(dump_json(j["messages"]), tools, "", true), what));
    MI_TRY(item.prompt, in_file(t.tokenizer->encode_mixed(rendered.text, rendered.user), what));
    items.push_back(std::move(item));
  }
  if (items.empty()) return bad_input("{}: no items in it", o.data.string());
  return items;
}

runtime::Request greedy_request(std::vector<int32_t> prompt, int64_t max_tokens) {
  runtime::Request r;
  r.prompt = std::move(prompt);
  r.sampling.temperature = 0;
  r.max_tokens = max_tokens;
  return r;
}

// Added tokens that are not special stay in the text of an answer (tool call marks).
std::string without_marks(const text::Tokenizer& t, const std::vector<int32_t>& tokens, const std::string& decoded) {
  std::string s = decoded;
  for (int32_t id : tokens) {
    const std::string mark(t.token_bytes(id));
    if (mark.size() < 4 || mark.rfind("<|", 0) != 0) continue;
    for (size_t at; (at = s.find(mark)) != std::string::npos;) s.erase(at, mark.size());
  }
  return s;
}

Result<std::vector<runtime::Request>> text_requests(const Session& s, const Path& file) {
  MI_TRY(const std::string content, read_file(file));
  std::vector<runtime::Request> requests;
  int64_t tokens = 0;
  const int64_t bos = s.engine->manifest().model.bos_id;
  const std::string body = trimmed(content);
  for (size_t at = 0; at < body.size();) {
    size_t end = body.find("\n\n", at);
    if (end == std::string::npos) end = body.size();
    MI_TRY(std::vector<int32_t> ids, in_file(s.text.tokenizer->encode(body.substr(at, end - at), true), file.string()));
    if (bos >= 0) ids.insert(ids.begin(), int32_t(bos));
    at = end + 2;
    if (ids.size() < 2) continue;
    runtime::Request r = greedy_request(std::move(ids), 0);
    r.prompt_logprobs = true;
    r.sampling.logprobs = 0;
    tokens += int64_t(r.prompt.size()) - 1;
    requests.push_back(std::move(r));
  }
  // The perplexity of a few tokens is a number that means nothing.
  constexpr int64_t kFewTokens = 16;
  if (tokens < kFewTokens)
    return bad_input("{}: {} tokens of text, too few for a perplexity; give at least {}", file.string(), tokens, kFewTokens);
  return requests;
}

Status score_text(runtime::EngineLoop& loop, std::vector<runtime::Request> requests, EvalResult* out) {
  MI_TRY(const std::vector<runtime::Completion> done, runtime::generate(loop, std::move(requests)));
  double nll = 0;
  for (const runtime::Completion& c : done)
    for (size_t i = 1; i < c.prompt.size(); ++i) {
      nll -= c.prompt[i].logprob;
      ++out->text_tokens;
    }
  if (out->text_tokens > 0) out->text_nll_per_token = nll / double(out->text_tokens);
  return {};
}

// Compares our greedy answers with recorded ones; where they part, both candidates are scored on the common prefix.
Result<Json> read_reference(const Path& file) {
  MI_TRY(Json reference, read_json(file));
  if (!reference.is_object() || !reference.contains("greedy") || !reference["greedy"].is_array())
    return bad_input("{}: expected an object with a list 'greedy' of {{prompt_ids, output_ids}}", file.string());
  return reference;
}

Status compare_greedy(runtime::EngineLoop& loop, const Json& reference, const Path& file, int64_t max_tokens, EvalResult* out) {
  std::vector<runtime::Request> requests;
  std::vector<std::vector<int32_t>> expected, prompts;
  for (const Json& entry : reference["greedy"]) {
    MI_TRY(const auto prompt, json_get<std::vector<int64_t>>(entry, "prompt_ids", file.string()));
    MI_TRY(const auto output, json_get<std::vector<int64_t>>(entry, "output_ids", file.string()));
    prompts.emplace_back(prompt.begin(), prompt.end());
    expected.emplace_back(output.begin(), output.end());
    requests.push_back(greedy_request(prompts.back(), max_tokens));
  }
  MI_TRY(const std::vector<runtime::Completion> done, runtime::generate(loop, std::move(requests)));
  for (size_t i = 0; i < done.size(); ++i) {
    ++out->greedy_compared;
    const std::vector<int32_t>& got = done[i].tokens;
    size_t at = 0;
    while (at < got.size() && at < expected[i].size() && got[at] == expected[i][at]) ++at;
    if (at == got.size() && at == expected[i].size()) continue;
    Divergence d{int64_t(i), int64_t(at), at < expected[i].size() ? expected[i][at] : -1,
                 at < got.size() ? got[at] : -1, 0};
    std::vector<int32_t> prefix = prompts[i];
    prefix.insert(prefix.end(), got.begin(), got.begin() + long(at));
    double score[2] = {0, 0};
    for (int k = 0; k < 2; ++k) {
      const int32_t candidate = k == 0 ? d.found : d.expected;
      if (candidate < 0) continue;
      std::vector<int32_t> ids = prefix;
      ids.push_back(candidate);
      runtime::Request r = greedy_request(std::move(ids), 0);
      r.prompt_logprobs = true;
      r.sampling.logprobs = 0;
      std::vector<runtime::Request> one;
      one.push_back(std::move(r));
      MI_TRY(const auto scored, runtime::generate(loop, std::move(one)));
      score[k] = scored[0].prompt.back().logprob;
    }
    d.margin = score[0] - score[1];
    out->divergences.push_back(d);
  }
  return {};
}

}  // namespace

bool answer_is_right(const std::string& check, const Json& answer, const std::string& output) {
  if (check == "exact") return answer.is_string() && output == answer.get<std::string>();
  if (check == "contains") return answer.is_string() && output.find(answer.get<std::string>()) != std::string::npos;
  auto parsed = parse_json(output, "answer");
  if (!parsed.ok()) return false;
  Json expected = answer;
  if (answer.is_string()) {
    auto e = parse_json(answer.get<std::string>(), "expected answer");
    if (!e.ok()) return false;
    expected = *e;
  }
  // Key order does not matter: compare as unordered JSON.
  return nlohmann::json::parse(dump_json(*parsed)) == nlohmann::json::parse(dump_json(expected));
}

Status check_eval(const text::ModelText& t, const EvalOptions& o) {
  MI_TRY_VOID(load_items(t, o));
  if (o.score_text && !o.text.empty()) MI_TRY_VOID(read_file(o.text));
  if (!o.reference.empty()) MI_TRY_VOID(read_reference(o.reference));
  return {};
}

Result<EvalResult> run_eval(const Session& s, const EvalOptions& o) {
  // Everything is read before the first answer.
  MI_TRY(const std::vector<Item> items, load_items(s.text, o));
  const Path text = o.text.empty() ? o.data.parent_path() / "text_ppl.txt" : o.text;
  std::vector<runtime::Request> scored;
  if (o.score_text && (!o.text.empty() || std::filesystem::exists(text))) {
    MI_TRY(scored, text_requests(s, text));
  }
  Json reference;
  if (!o.reference.empty()) {
    MI_TRY(reference, read_reference(o.reference));
  }
  EvalResult result;
  const auto start = std::chrono::steady_clock::now();
  const std::unique_ptr<runtime::EngineLoop> loop = s.make_loop();
  std::vector<runtime::Request> requests;
  for (const Item& item : items) requests.push_back(greedy_request(item.prompt, o.max_tokens));
  MI_TRY(const std::vector<runtime::Completion> done, runtime::generate(*loop, std::move(requests)));
  for (size_t i = 0; i < items.size(); ++i) {
    if (!result.groups.count(items[i].group)) result.group_order.push_back(items[i].group);
    GroupResult& g = result.groups[items[i].group];
    ++g.items;
    result.prompts.push_back(items[i].prompt);
    result.answers.push_back(done[i].tokens);
    result.item_groups.push_back(items[i].group);
    result.generated_tokens += int64_t(done[i].tokens.size());
    g.right += answer_is_right(items[i].check, items[i].answer,
                               trimmed(without_marks(*s.text.tokenizer, done[i].tokens, done[i].text)));
  }
  if (!scored.empty()) MI_TRY_VOID(score_text(*loop, std::move(scored), &result));
  if (!o.reference.empty()) MI_TRY_VOID(compare_greedy(*loop, reference, o.reference, o.max_tokens, &result));
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

Json eval_json(const EvalResult& r) {
  Json j;
  for (const std::string& g : r.group_order) {
    j["accuracy"][g] = r.groups.at(g).accuracy();
    j["items"][g] = r.groups.at(g).items;
  }
  if (r.text_tokens > 0) {
    j["text_nll_per_token"] = r.text_nll_per_token;
    j["text_perplexity"] = std::exp(r.text_nll_per_token);
    j["text_tokens"] = r.text_tokens;
  }
  if (r.greedy_compared > 0) {
    j["greedy_compared"] = r.greedy_compared;
    j["greedy_equal"] = r.greedy_compared - int64_t(r.divergences.size());
    j["greedy_divergences"] = Json::array();
    for (const Divergence& d : r.divergences)
      j["greedy_divergences"].push_back(
          {{"item", d.index}, {"token", d.at}, {"expected", d.expected}, {"found", d.found}, {"margin", d.margin}});
  }
  j["generated_tokens"] = r.generated_tokens;
  j["seconds"] = r.seconds;
  return j;
}

std::string eval_table(const std::vector<std::pair<std::string, EvalResult>>& columns) {
  std::string s = fmt::format("{:<18}", "group");
  for (const auto& [name, r] : columns) s += fmt::format(" {:>12}", name);
  s += "\n";
  for (const std::string& g : columns.front().second.group_order) {
    s += fmt::format("{:<18}", g);
    for (const auto& [name, r] : columns)
      s += r.groups.count(g) ? fmt::format(" {:>10.1f} %", 100 * r.groups.at(g).accuracy())
                             : fmt::format(" {:>12}", "-");
    s += "\n";
  }
  if (columns.front().second.text_tokens > 0) {
    s += fmt::format("{:<18}", "text perplexity");
    for (const auto& [name, r] : columns) s += fmt::format(" {:>12.4f}", std::exp(r.text_nll_per_token));
    s += "\n";
  }
  if (columns.front().second.greedy_compared > 0) {
    s += fmt::format("{:<18}", "greedy as recorded");
    for (const auto& [name, r] : columns)
      s += fmt::format(" {:>12}",
                       fmt::format("{}/{}", r.greedy_compared - int64_t(r.divergences.size()), r.greedy_compared));
    s += "\n";
  }
  return s;
}

}  // namespace mi::tools
