// /v1/chat/completions
#include "server/job.h"

namespace mi::server {
namespace {

class ChatJob : public Job {
 public:
  ChatJob(ServerContext& c, std::shared_ptr<Exchange> e) : Job(c, std::move(e), "chat_completions") {}

  void begin(const std::string& body) {
    auto parsed = parse_body(body);
    if (const auto* e = std::get_if<ApiError>(&parsed)) return fail(*e);
    if (const auto e = parse_chat(std::get<Json>(parsed), context_.defaults, &request_)) return fail(*e);
    if (!context_.serves(request_.model)) return fail(unknown_model(request_.model));
    std::vector<runtime::Request> requests;
    if (const auto e = make_requests(&requests)) return fail(*e);
    set_prompt_tokens(int64_t(requests[0].prompt.size()));
    choices_.resize(requests.size());
    for (Choice& c : choices_) c.splitter = make_splitter();
    start(std::move(requests), request_.stream);
  }

 private:
  struct Call {
    std::string id, name, arguments;
  };
  struct Choice {
    std::string content, finish;
    std::vector<Call> calls;
    Json logprobs = Json::array();
    std::unique_ptr<ToolSplitter> splitter;  // null: all text is content
  };

  std::unique_ptr<ToolSplitter> make_splitter() const {
    switch (request_.tool_choice) {
      case ToolChoice::kNone:
        return nullptr;
      case ToolChoice::kAuto:
        return context_.marks.begin.empty() ? nullptr : split_marked(context_.marks);
      case ToolChoice::kRequired:
        return split_list();
      case ToolChoice::kNamed:
        return split_bare(request_.tool_name);
    }
    return nullptr;
  }

  // The grammar that the answer must follow, or nothing.
  std::optional<ApiError> make_constraint(std::unique_ptr<text::Constraint>* out) const {
    Result<std::unique_ptr<text::Constraint>> made = std::unique_ptr<text::Constraint>();
    const char* param = "response_format";
    if (request_.tool_choice == ToolChoice::kNamed) {
      param = "tools";
      for (const Tool& t : request_.tools)
        if (t.name == request_.tool_name) made = context_.constraints->json_schema(dump_json(named_call_schema(t)));
    } else if (request_.tool_choice == ToolChoice::kRequired) {
      param = "tools";
      made = context_.constraints->json_schema(
          dump_json(required_calls_schema(request_.tools, request_.parallel_tool_calls)));
    } else if (request_.format == AnswerFormat::kJsonObject) {
      made = context_.constraints->json_object();
    } else if (request_.format == AnswerFormat::kJsonSchema) {
      made = context_.constraints->json_schema(dump_json(request_.schema));
    }
    if (!made.ok()) return bad_field(param, made.error().message());
    *out = std::move(made).value();
    return std::nullopt;
  }

  std::optional<ApiError> make_requests(std::vector<runtime::Request>* out) {
    if (!context_.text.chat)
      return ApiError{400, "this model has no chat template; use /v1/completions", "invalid_request_error", {}, {}};
    const std::string tools = request_.tools_json.is_null() ? "" : dump_json(request_.tools_json);
    const std::string extra = request_.template_kwargs.is_null() ? "" : dump_json(request_.template_kwargs);
    auto rendered = context_.text.chat->render(dump_json(request_.messages), tools, extra, true);
    if (!rendered.ok()) return bad_field("messages", rendered.error().message());
    if (auto e = too_long_by_bytes(context_, "messages", rendered->text.size())) return e;
    auto ids = context_.text.tokenizer->encode_mixed(rendered->text, rendered->user);
    if (!ids.ok()) return bad_field("messages", ids.error().message());
    std::unique_ptr<text::Constraint> constraint;
    if (auto e = make_constraint(&constraint)) return e;
    for (int64_t i = 0; i < request_.n; ++i) {
      runtime::Request r;
      r.prompt = *ids;
      r.sampling = request_.sampling;
      // Choices of one seeded request differ from each other, and are the same each time.
      if (r.sampling.seed) *r.sampling.seed += uint64_t(i);
      r.max_tokens = request_.max_tokens;
      r.stop = request_.stop;
      if (constraint) r.constraint = constraint->clone();
      out->push_back(std::move(r));
    }
    return std::nullopt;
  }

  Json head(const char* object) const {
    return {{"id", id_}, {"object", object}, {"created", created_}, {"model", request_.model}};
  }

  void send_delta(size_t choice, Json delta, Json logprobs, Json finish) {
    Json j = head("chat.completion.chunk");
    j["choices"] = Json::array({{{"index", choice},
                                 {"delta", std::move(delta)},
                                 {"logprobs", std::move(logprobs)},
                                 {"finish_reason", std::move(finish)}}});
    send_event(j);
  }

  void on_start() override {
    for (size_t i = 0; i < choices_.size(); ++i)
      send_delta(i, {{"role", "assistant"}, {"content", ""}}, nullptr, nullptr);
  }

  // Content and calls of a piece of text; in a stream what is new goes out, log-probabilities with the first part.
  void add_text(size_t index, std::vector<ToolPiece> pieces, Json logprobs) {
    Choice& c = choices_[index];
    for (ToolPiece& p : pieces) {
      Json delta;
      if (p.kind == ToolPiece::kContent) {
        c.content += p.text;
        delta = {{"content", p.text}};
      } else if (p.kind == ToolPiece::kCallBegin) {
        c.calls.push_back({new_id("call"), p.text, ""});
        delta = {{"tool_calls", Json::array({{{"index", c.calls.size() - 1},
                                              {"id", c.calls.back().id},
                                              {"type", "function"},
                                              {"function", {{"name", p.text}, {"arguments", ""}}}}})}};
      } else {
        if (c.calls.empty()) continue;
        c.calls.back().arguments += p.text;
        delta = {{"tool_calls", Json::array({{{"index", c.calls.size() - 1}, {"function", {{"arguments", p.text}}}}})}};
      }
      if (stream_) send_delta(index, std::move(delta), std::exchange(logprobs, Json()), nullptr);
    }
    if (stream_ && !logprobs.is_null()) send_delta(index, {{"content", ""}}, std::move(logprobs), nullptr);
  }

  std::vector<ToolPiece> split(Choice& c, const std::string& text) {
    if (c.splitter) return c.splitter->push(text);
    if (text.empty()) return {};
    return {{ToolPiece::kContent, text}};
  }

  void on_token(size_t index, const runtime::TokenEvent& e) override {
    if (e.end) return;
    Choice& c = choices_[index];
    Json logprobs;
    if (request_.sampling.logprobs >= 0) {
      Json entry = chat_logprob(*context_.text.tokenizer, e.token, e.logprob, e.top);
      if (stream_)
        logprobs = {{"content", Json::array({std::move(entry)})}, {"refusal", nullptr}};
      else
        c.logprobs.push_back(std::move(entry));
    }
    add_text(index, split(c, e.text), std::move(logprobs));
  }

  void on_finish(size_t index, const runtime::FinishEvent& e) override {
    Choice& c = choices_[index];
    add_text(index, split(c, e.text), nullptr);
    if (c.splitter) add_text(index, c.splitter->finish(), nullptr);
    c.finish = e.reason == runtime::FinishReason::kLength ? "length" : !c.calls.empty() ? "tool_calls" : "stop";
    if (stream_) send_delta(index, Json::object(), nullptr, c.finish);
  }

  void on_all_finished() override {
    const Json usage = usage_json(prompt_tokens(), completion_tokens());
    if (stream_) {
      if (!request_.include_usage) return;
      Json j = head("chat.completion.chunk");
      j["choices"] = Json::array();
      j["usage"] = usage;
      return send_event(j);
    }
    Json j = head("chat.completion");
    j["choices"] = Json::array();
    for (size_t i = 0; i < choices_.size(); ++i) {
      Choice& c = choices_[i];
      Json message{{"role", "assistant"}, {"content", c.content}, {"refusal", nullptr}};
      if (!c.calls.empty()) {
        if (c.content.empty()) message["content"] = nullptr;
        message["tool_calls"] = Json::array();
        for (const Call& call : c.calls)
          message["tool_calls"].push_back({{"id", call.id},
                                           {"type", "function"},
                                           {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
      }
      Json logprobs;
      if (request_.sampling.logprobs >= 0) logprobs = {{"content", std::move(c.logprobs)}, {"refusal", nullptr}};
      j["choices"].push_back({{"index", i},
                              {"message", std::move(message)},
                              {"logprobs", std::move(logprobs)},
                              {"finish_reason", c.finish}});
    }
    j["usage"] = usage;
    respond_whole(j);
  }

  ChatRequest request_;
  std::vector<Choice> choices_;
  const std::string id_ = new_id("chatcmpl");
  const int64_t created_ = now_seconds();
};

}  // namespace

void start_chat(ServerContext& c, std::shared_ptr<Exchange> e) {
  auto job = std::make_shared<ChatJob>(c, e);
  job->begin(e->request().body);
}

}  // namespace mi::server
