// /v1/messages and /v1/messages/count_tokens: the Anthropic form of a chat.
#include "server/anthropic/request.h"
#include "server/chat_job.h"

namespace mi::server {
namespace {

class MessagesJob : public ChatJob {
 public:
  MessagesJob(ServerContext& c, std::shared_ptr<Exchange> e) : ChatJob(c, std::move(e)) {}

 private:
  std::optional<ApiError> parse(const Json& body) override { return parse_message(body, context_.defaults, &request_); }
  const char* format_param() const override { return "output_config"; }
  const char* call_id_prefix() const override { return "toolu"; }
  std::string error_body(const ApiError& e) const override { return anthropic_error_json(e); }
  std::string stream_error(const ApiError& e) override { return "event: error\ndata: " + error_body(e) + "\n\n"; }
  std::string stream_end() override { return "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"; }

  Json message(Json content, Json stop_reason, Json stop_sequence, int64_t output_tokens) const {
    return {{"id", id_},
            {"type", "message"},
            {"role", "assistant"},
            {"model", request_.model},
            {"content", std::move(content)},
            {"stop_reason", std::move(stop_reason)},
            {"stop_sequence", std::move(stop_sequence)},
            {"usage", usage(output_tokens)}};
  }
  Json usage(int64_t output_tokens) const {
    return {{"input_tokens", prompt_tokens() - cached_tokens()},
            {"cache_creation_input_tokens", 0},
            {"cache_read_input_tokens", cached_tokens()},
            {"output_tokens", output_tokens}};
  }
  const char* stop_reason() const {
    const Choice& c = choices_[0];
    if (c.end.reason == runtime::FinishReason::kLength) return "max_tokens";
    if (c.end.stop_string) return "stop_sequence";
    return c.calls.empty() ? "end_turn" : "tool_use";
  }
  Json stop_sequence() const {
    const auto& s = choices_[0].end.stop_string;
    return s ? Json(*s) : Json();
  }

  void on_start() override {
    send_named_event("message_start",
                     {{"type", "message_start"}, {"message", message(Json::array(), nullptr, nullptr, 0)}});
  }

  void open_block(Json block) {
    send_named_event("content_block_start",
                     {{"type", "content_block_start"}, {"index", block_}, {"content_block", std::move(block)}});
    open_ = true;
  }
  void close_block() {
    if (!open_) return;
    send_named_event("content_block_stop", {{"type", "content_block_stop"}, {"index", block_}});
    open_ = false;
    ++block_;
  }
  void send_delta(Json delta) {
    send_named_event("content_block_delta",
                     {{"type", "content_block_delta"}, {"index", block_}, {"delta", std::move(delta)}});
  }
  void on_piece(size_t, const ToolPiece& p, Json) override {
    const bool new_block = p.kind == ToolPiece::kCallBegin || !open_ ||
                           (p.kind != kind_ && !(p.kind == ToolPiece::kArguments && kind_ == ToolPiece::kCallBegin));
    if (new_block) {
      close_block();
      if (p.kind == ToolPiece::kContent)
        open_block({{"type", "text"}, {"text", ""}});
      else if (p.kind == ToolPiece::kReasoning)
        open_block({{"type", "thinking"}, {"thinking", ""}, {"signature", ""}});
      else
        open_block({{"type", "tool_use"},
                    {"id", choices_[0].calls.back().id},
                    {"name", choices_[0].calls.back().name},
                    {"input", Json::object()}});
    }
    if (p.kind == ToolPiece::kContent)
      send_delta({{"type", "text_delta"}, {"text", p.text}});
    else if (p.kind == ToolPiece::kReasoning)
      send_delta({{"type", "thinking_delta"}, {"thinking", p.text}});
    else if (p.kind == ToolPiece::kArguments)
      send_delta({{"type", "input_json_delta"}, {"partial_json", p.text}});
    blocks_ = true;
    kind_ = p.kind == ToolPiece::kArguments ? ToolPiece::kCallBegin : p.kind;
  }
  void on_end(size_t) override {}

  // The whole answer's blocks, in the order in which a stream sends them: reasoning, text, calls.
  Json blocks() const {
    const Choice& c = choices_[0];
    Json list = Json::array();
    if (!c.reasoning.empty()) list.push_back({{"type", "thinking"}, {"thinking", c.reasoning}, {"signature", ""}});
    if (!c.content.empty() || (c.calls.empty() && c.reasoning.empty()))
      list.push_back({{"type", "text"}, {"text", c.content}});
    for (const Call& call : c.calls) {
      // A call that was cut off has no input that could be read.
      JsonLimits limits;
      limits.refuse_duplicate_keys = false;
      auto input = parse_json(call.arguments, "arguments", limits);
      list.push_back({{"type", "tool_use"},
                      {"id", call.id},
                      {"name", call.name},
                      {"input", input.ok() && input->is_object() ? std::move(input).value() : Json::object()}});
    }
    return list;
  }

  void on_all_finished() override {
    if (!stream_) return respond_whole(message(blocks(), stop_reason(), stop_sequence(), completion_tokens()));
    if (!blocks_) open_block({{"type", "text"}, {"text", ""}});
    close_block();
    send_named_event("message_delta", {{"type", "message_delta"},
                                       {"delta", {{"stop_reason", stop_reason()}, {"stop_sequence", stop_sequence()}}},
                                       {"usage", usage(completion_tokens())}});
  }

  const std::string id_ = new_id("msg");
  int block_ = 0;
  bool open_ = false, blocks_ = false;
  ToolPiece::Kind kind_ = ToolPiece::kContent;
};

class CountTokensJob : public Job {
 public:
  CountTokensJob(ServerContext& c, std::shared_ptr<Exchange> e) : Job(c, std::move(e)) {}
  void begin(const std::string& body) {
    auto parsed = parse_body(body);
    if (const auto* e = std::get_if<ApiError>(&parsed)) return fail(*e);
    ChatRequest r;
    if (const auto e = parse_count_tokens(std::get<Json>(parsed), &r)) return fail(*e);
    if (!context_.serves(r.model)) return fail(unknown_model(r.model));
    text::Rendered prompt;
    std::vector<int32_t> ids;
    if (const auto e = render_chat(context_, r, &prompt)) return fail(*e);
    if (const auto e = chat_ids(context_, prompt, &ids)) return fail(*e);
    respond_whole({{"input_tokens", ids.size()}});
  }

 private:
  std::string error_body(const ApiError& e) const override { return anthropic_error_json(e); }
  void on_finish(size_t, const runtime::FinishEvent&) override {}
  void on_all_finished() override {}
};

}  // namespace

void start_message(ServerContext& c, std::shared_ptr<Exchange> e) {
  std::make_shared<MessagesJob>(c, e)->begin(e->request().body);
}
void start_count_tokens(ServerContext& c, std::shared_ptr<Exchange> e) {
  std::make_shared<CountTokensJob>(c, e)->begin(e->request().body);
}

}  // namespace mi::server
