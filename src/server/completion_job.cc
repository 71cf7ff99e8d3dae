// /v1/completions
#include "server/job.h"

namespace mi::server {
namespace {

class CompletionJob : public Job {
 public:
  CompletionJob(ServerContext& c, std::shared_ptr<Exchange> e) : Job(c, std::move(e)) {}

  void begin(const std::string& body) {
    auto parsed = parse_body(body);
    if (const auto* e = std::get_if<ApiError>(&parsed)) return fail(*e);
    if (const auto e = parse_completion(std::get<Json>(parsed), context_.defaults, &request_)) return fail(*e);
    if (!context_.serves(request_.model)) return fail(unknown_model(request_.model));
    if (int64_t(request_.prompts.size()) * request_.n > int64_t(kMaxPrompts))
      return fail(bad_field("n", fmt::format("prompts times n is {}; {} are the most",
                                             int64_t(request_.prompts.size()) * request_.n, kMaxPrompts)));
    std::vector<runtime::Request> requests;
    if (const auto e = make_requests(&requests)) return fail(*e);
    set_choices_per_prompt(request_.n);
    start(std::move(requests), request_.stream);
  }

 private:
  struct Choice {
    std::string text, finish;
    std::string echo;  // the prompt's text, sent before the first token
    std::unique_ptr<CompletionLogprobs> logprobs;
    bool scores_echo = false;
  };

  std::optional<ApiError> ids_of(const std::variant<std::string, std::vector<int32_t>>& prompt,
                                 std::vector<int32_t>* ids, std::string* text) {
    if (auto e = prompt_ids(context_, "prompt", prompt, ids)) return e;
    if (const auto* given = std::get_if<std::string>(&prompt)) {
      *text = *given;
    } else if (request_.echo) {
      auto decoded = context_.text.tokenizer->decode(*ids, false);
      if (!decoded.ok()) return bad_field("prompt", decoded.error().message());
      *text = clean_utf8(*decoded);
    }
    return std::nullopt;
  }

  std::optional<ApiError> make_requests(std::vector<runtime::Request>* out) {
    if (!context_.text.tokenizer) return ApiError{400, "this model has no tokenizer", "invalid_request_error", {}, {}};
    std::unique_ptr<text::Constraint> constraint;
    if (auto e = make_format_constraint(context_, request_, format_param(), &constraint)) return e;
    int64_t prompt_tokens = 0;
    for (const auto& prompt : request_.prompts) {
      std::vector<int32_t> ids;
      std::string text;
      if (auto e = ids_of(prompt, &ids, &text)) return e;
      prompt_tokens += int64_t(ids.size());
      for (int64_t i = 0; i < request_.n; ++i) {
        runtime::Request r = request_of(request_, i);
        r.prompt = ids;
        if (constraint) r.constraint = constraint->clone();
        Choice c;
        if (request_.sampling.logprobs >= 0)
          c.logprobs = std::make_unique<CompletionLogprobs>(*context_.text.tokenizer);
        if (request_.echo) {
          c.echo = text;
          c.scores_echo = c.logprobs != nullptr;
          r.prompt_logprobs = c.scores_echo;
        }
        choices_.push_back(std::move(c));
        out->push_back(std::move(r));
      }
    }
    set_prompt_tokens(prompt_tokens);
    return std::nullopt;
  }

  Json head() const {
    return {{"id", id_}, {"object", "text_completion"}, {"created", created_}, {"model", request_.model}};
  }

  void add(size_t index, const std::string& text, Json finish) {
    Choice& c = choices_[index];
    c.text += text;
    if (!stream_) return;
    Json logprobs;
    if (c.logprobs && !c.logprobs->empty()) logprobs = c.logprobs->take();
    if (text.empty() && logprobs.is_null() && finish.is_null()) return;
    Json j = head();
    j["choices"] = Json::array(
        {{{"index", index}, {"text", text}, {"logprobs", std::move(logprobs)}, {"finish_reason", std::move(finish)}}});
    send_event(j);
  }
  std::string take_echo(Choice& c) { return std::exchange(c.echo, std::string()); }

  void on_prompt(size_t index, const runtime::PromptEvent& e) override {
    Choice& c = choices_[index];
    if (!c.scores_echo) return;
    for (size_t i = 0; i < e.prompt.size(); ++i)
      c.logprobs->add(e.prompt[i].token, e.prompt[i].logprob, e.prompt[i].top, i > 0);
    add(index, take_echo(c), nullptr);
  }

  void on_token(size_t index, const runtime::TokenEvent& e) override {
    if (e.end) return;
    Choice& c = choices_[index];
    if (c.logprobs) c.logprobs->add(e.token, e.logprob, e.top);
    add(index, take_echo(c) + e.text, nullptr);
  }

  void on_finish(size_t index, const runtime::FinishEvent& e) override {
    Choice& c = choices_[index];
    c.finish = e.reason == runtime::FinishReason::kLength ? "length" : "stop";
    add(index, take_echo(c) + e.text, c.finish);
  }

  void on_all_finished() override {
    const Json usage = usage_json(prompt_tokens(), completion_tokens(), cached_tokens());
    if (stream_) {
      if (!request_.include_usage) return;
      Json j = head();
      j["choices"] = Json::array();
      j["usage"] = usage;
      return send_event(j);
    }
    Json j = head();
    j["choices"] = Json::array();
    for (size_t i = 0; i < choices_.size(); ++i) {
      Choice& c = choices_[i];
      j["choices"].push_back({{"index", i},
                              {"text", std::move(c.text)},
                              {"logprobs", c.logprobs ? c.logprobs->take() : Json()},
                              {"finish_reason", c.finish}});
    }
    j["usage"] = usage;
    respond_whole(j);
  }

  CompletionRequest request_;
  std::vector<Choice> choices_;
  const std::string id_ = new_id("cmpl");
  const int64_t created_ = now_seconds();
};

}  // namespace

void start_completion(ServerContext& c, std::shared_ptr<Exchange> e) {
  auto job = std::make_shared<CompletionJob>(c, e);
  job->begin(e->request().body);
}

}  // namespace mi::server
