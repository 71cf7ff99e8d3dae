// /v1/chat/completions
#include "server/chat_job.h"

namespace mi::server {
namespace {

class ChatCompletionsJob : public ChatJob {
 public:
  ChatCompletionsJob(ServerContext& c, std::shared_ptr<Exchange> e) : ChatJob(c, std::move(e)) {}

 private:
  std::optional<ApiError> parse(const Json& body) override { return parse_chat(body, context_.defaults, &request_); }

  Json head(const char* object) const {
    return {{"id", id_}, {"object", object}, {"created", created_}, {"model", request_.model}};
  }
  Json usage() const {
    Json u = usage_json(prompt_tokens(), completion_tokens(), cached_tokens());
    int64_t reasoning = 0;
    for (const Choice& c : choices_) reasoning += c.reasoning_tokens;
    u["completion_tokens_details"] = {{"reasoning_tokens", reasoning}};
    return u;
  }
  static const char* finish_reason(const Choice& c) {
    return c.end.reason == runtime::FinishReason::kLength ? "length" : !c.calls.empty() ? "tool_calls" : "stop";
  }

  void send_delta(size_t choice, Json delta, Json logprob, Json finish) {
    Json logprobs;
    if (!logprob.is_null()) logprobs = {{"content", Json::array({std::move(logprob)})}, {"refusal", nullptr}};
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
  void on_piece(size_t index, const ToolPiece& p, Json logprob) override {
    const Choice& c = choices_[index];
    Json delta;
    switch (p.kind) {
      case ToolPiece::kContent:
        delta = {{"content", p.text}};
        break;
      case ToolPiece::kReasoning:
        delta = {{"reasoning_content", p.text}};
        break;
      case ToolPiece::kCallBegin:
        delta = {{"tool_calls", Json::array({{{"index", c.calls.size() - 1},
                                              {"id", c.calls.back().id},
                                              {"type", "function"},
                                              {"function", {{"name", p.text}, {"arguments", ""}}}}})}};
        break;
      case ToolPiece::kArguments:
        delta = {{"tool_calls", Json::array({{{"index", c.calls.size() - 1}, {"function", {{"arguments", p.text}}}}})}};
        break;
    }
    send_delta(index, std::move(delta), std::move(logprob), nullptr);
  }
  void on_silent(size_t index, Json logprob) override {
    send_delta(index, {{"content", ""}}, std::move(logprob), nullptr);
  }
  void on_logprob(size_t index, Json logprob) override {
    logprobs_.resize(choices_.size(), Json::array());
    logprobs_[index].push_back(std::move(logprob));
  }
  void on_end(size_t index) override {
    if (stream_) send_delta(index, Json::object(), nullptr, finish_reason(choices_[index]));
  }

  void on_all_finished() override {
    if (stream_) {
      if (!request_.include_usage) return;
      Json j = head("chat.completion.chunk");
      j["choices"] = Json::array();
      j["usage"] = usage();
      return send_event(j);
    }
    logprobs_.resize(choices_.size(), Json::array());
    Json j = head("chat.completion");
    j["choices"] = Json::array();
    for (size_t i = 0; i < choices_.size(); ++i) {
      const Choice& c = choices_[i];
      Json message{{"role", "assistant"}, {"content", c.content}, {"refusal", nullptr}};
      if (!c.reasoning.empty()) message["reasoning_content"] = c.reasoning;
      if (!c.calls.empty()) {
        if (c.content.empty()) message["content"] = nullptr;
        message["tool_calls"] = Json::array();
        for (const Call& call : c.calls)
          message["tool_calls"].push_back({{"id", call.id},
                                           {"type", "function"},
                                           {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
      }
      Json logprobs;
      if (request_.sampling.logprobs >= 0) logprobs = {{"content", std::move(logprobs_[i])}, {"refusal", nullptr}};
      j["choices"].push_back({{"index", i},
                              {"message", std::move(message)},
                              {"logprobs", std::move(logprobs)},
                              {"finish_reason", finish_reason(c)}});
    }
    j["usage"] = usage();
    respond_whole(j);
  }

  std::vector<Json> logprobs_;  // by choice; whole answers only
  const std::string id_ = new_id("chatcmpl");
};

}  // namespace

void start_chat(ServerContext& c, std::shared_ptr<Exchange> e) {
  std::make_shared<ChatCompletionsJob>(c, e)->begin(e->request().body);
}

}  // namespace mi::server
