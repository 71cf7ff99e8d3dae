#include "server/chat_job.h"

#include <algorithm>

namespace mi::server {
namespace {

bool forces(const ChatRequest& r) {
  return r.tool_choice == ToolChoice::kRequired || r.tool_choice == ToolChoice::kNamed ||
         r.format != AnswerFormat::kText;
}

// A grammar holds from the first token on, so a forced answer has no place for reasoning: templates are told so by the
// names that they know.
std::string template_variables(const ServerContext& c, const ChatRequest& r) {
  Json variables = r.template_kwargs;
  if (forces(r) && !c.format.think.empty()) {
    if (variables.is_null()) variables = Json::object();
    if (!variables.contains("enable_thinking")) variables["enable_thinking"] = false;
    if (!variables.contains("thinking_mode")) variables["thinking_mode"] = "disabled";
  }
  return variables.is_null() ? "" : dump_json(variables);
}

}  // namespace

std::optional<ApiError> render_chat(const ServerContext& c, const ChatRequest& r, text::Rendered* prompt) {
  if (!c.text.chat || !c.text.tokenizer)
    return ApiError{400, "this model has no chat template; use /v1/completions", "invalid_request_error", {}, {}};
  const std::string tools = r.tools_json.is_null() ? "" : dump_json(r.tools_json);
  auto rendered = c.text.chat->render(dump_json(r.messages), tools, template_variables(c, r), r.add_generation_prompt);
  if (!rendered.ok()) return bad_field("messages", rendered.error().message());
  *prompt = std::move(rendered).value();
  if (forces(r) && opens_reasoning(c.format, prompt->text)) prompt->text += "\n" + c.format.think_end + "\n\n";
  return too_long_by_bytes(c, "messages", prompt->text.size());
}

std::optional<ApiError> chat_ids(const ServerContext& c, const text::Rendered& prompt, std::vector<int32_t>* ids) {
  auto encoded = c.text.tokenizer->encode_mixed(prompt.text, prompt.user);
  if (!encoded.ok()) return bad_field("messages", encoded.error().message());
  *ids = std::move(encoded).value();
  return std::nullopt;
}

void ChatJob::begin(const std::string& body) {
  auto parsed = parse_body(body);
  if (const auto* e = std::get_if<ApiError>(&parsed)) return fail(*e);
  if (const auto e = parse(std::get<Json>(parsed))) return fail(*e);
  if (!context_.serves(request_.model)) return fail(unknown_model(request_.model));
  std::vector<runtime::Request> requests;
  if (const auto e = make_requests(&requests)) return fail(*e);
  set_prompt_tokens(int64_t(requests[0].prompt.size()));
  set_choices_per_prompt(request_.n);
  start(std::move(requests), request_.stream);
}

std::unique_ptr<ToolSplitter> ChatJob::make_splitter(std::string_view prompt) const {
  if (request_.tool_choice == ToolChoice::kRequired) return split_list();
  if (request_.tool_choice == ToolChoice::kNamed) return split_bare(request_.tool_name);
  if (request_.format != AnswerFormat::kText) return nullptr;
  const ReplyFormat& f = context_.format;
  // Without tools the marks of calls are text; harmony's also carry the answer.
  auto calls = request_.tool_choice == ToolChoice::kAuto || f.calls == ReplyFormat::Calls::kHarmony
                   ? split_calls(f, request_.tools)
                   : nullptr;
  if (f.think.empty()) return calls;
  return split_reasoning(f.think, f.think_end, opens_reasoning(f, prompt), std::move(calls));
}

const char* ChatJob::grammar_param() const {
  return request_.format == AnswerFormat::kText ? "tools" : format_param();
}

std::optional<ApiError> ChatJob::make_constraint(std::unique_ptr<text::Constraint>* out) const {
  Result<std::unique_ptr<text::Constraint>> made = std::unique_ptr<text::Constraint>();
  if (request_.tool_choice == ToolChoice::kNamed) {
    for (const Tool& t : request_.tools)
      if (t.name == request_.tool_name) made = context_.constraints->json_schema(dump_json(named_call_schema(t)));
  } else if (request_.tool_choice == ToolChoice::kRequired) {
    made = context_.constraints->json_schema(
        dump_json(required_calls_schema(request_.tools, request_.parallel_tool_calls)));
  } else if (request_.tool_choice == ToolChoice::kAuto && request_.format == AnswerFormat::kText &&
             context_.format.calls == ReplyFormat::Calls::kJson &&
             std::any_of(request_.tools.begin(), request_.tools.end(), [](const Tool& t) { return t.strict; })) {
    const CallMarks& marks = context_.format.json;
    const int32_t begin = context_.text.tokenizer->id_of(marks.begin), end = context_.text.tokenizer->id_of(marks.end);
    if (begin >= 0 && end >= 0)
      made = context_.constraints->lark(free_calls_grammar(request_.tools, request_.parallel_tool_calls, begin, end));
  } else {
    return make_format_constraint(context_, request_, format_param(), out);
  }
  if (!made.ok()) return bad_field("tools", "tools: " + made.error().message());
  *out = std::move(made).value();
  return std::nullopt;
}

std::optional<ApiError> ChatJob::make_requests(std::vector<runtime::Request>* out) {
  text::Rendered prompt;
  std::vector<int32_t> ids;
  if (auto e = render_chat(context_, request_, &prompt)) return e;
  if (auto e = chat_ids(context_, prompt, &ids)) return e;
  std::unique_ptr<text::Constraint> constraint;
  if (auto e = make_constraint(&constraint)) return e;
  choices_.resize(size_t(request_.n));
  for (int64_t i = 0; i < request_.n; ++i) {
    runtime::Request r = request_of(request_, i);
    r.prompt = ids;
    choices_[size_t(i)].splitter = make_splitter(prompt.text);
    if (choices_[size_t(i)].splitter) r.shown_special = context_.shown_special;
    if (constraint) r.constraint = constraint->clone();
    out->push_back(std::move(r));
  }
  return std::nullopt;
}

void ChatJob::add_pieces(size_t index, std::vector<ToolPiece> pieces, Json logprob) {
  Choice& c = choices_[index];
  const bool single = !request_.parallel_tool_calls;
  for (ToolPiece& p : pieces) {
    c.thinking = p.kind == ToolPiece::kReasoning;
    switch (p.kind) {
      case ToolPiece::kContent:
        c.content += p.text;
        break;
      case ToolPiece::kReasoning:
        c.reasoning += p.text;
        break;
      case ToolPiece::kCallBegin:
        c.calls.push_back({new_id(call_id_prefix()), p.text, ""});
        break;
      case ToolPiece::kArguments:
        if (c.calls.empty()) continue;
        c.calls.back().arguments += p.text;
        break;
    }
    const bool call = p.kind == ToolPiece::kCallBegin || p.kind == ToolPiece::kArguments;
    if (stream_ && !(single && call && c.calls.size() > 1)) on_piece(index, p, std::exchange(logprob, Json()));
  }
  if (logprob.is_null()) return;
  if (stream_)
    on_silent(index, std::move(logprob));
  else
    on_logprob(index, std::move(logprob));
}

void ChatJob::on_token(size_t index, const runtime::TokenEvent& e) {
  if (e.end) return;
  Choice& c = choices_[index];
  Json logprob;
  if (request_.sampling.logprobs >= 0) logprob = chat_logprob(*context_.text.tokenizer, e.token, e.logprob, e.top);
  std::vector<ToolPiece> pieces;
  if (c.splitter)
    pieces = c.splitter->push(e.text);
  else if (!e.text.empty())
    pieces.push_back({ToolPiece::kContent, e.text});
  if (!stream_ && !logprob.is_null()) on_logprob(index, std::exchange(logprob, Json()));
  add_pieces(index, std::move(pieces), std::move(logprob));
  if (c.thinking) ++c.reasoning_tokens;
}

void ChatJob::on_finish(size_t index, const runtime::FinishEvent& e) {
  Choice& c = choices_[index];
  std::vector<ToolPiece> pieces;
  if (c.splitter)
    pieces = c.splitter->push(e.text);
  else if (!e.text.empty())
    pieces.push_back({ToolPiece::kContent, e.text});
  add_pieces(index, std::move(pieces), nullptr);
  if (c.splitter) add_pieces(index, c.splitter->finish(), nullptr);
  if (!request_.parallel_tool_calls && c.calls.size() > 1) c.calls.resize(1);
  c.end = e;
  on_end(index);
}

}  // namespace mi::server
