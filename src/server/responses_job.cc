// /v1/responses: a chat as items.
#include "server/chat_job.h"
#include "server/responses/request.h"

namespace mi::server {
namespace {

class ResponsesJob : public ChatJob {
 public:
  ResponsesJob(ServerContext& c, std::shared_ptr<Exchange> e) : ChatJob(c, std::move(e)) {}

 private:
  // One item of the output while it is made; `kind` is that of its pieces (kCallBegin: a call).
  struct Item {
    ToolPiece::Kind kind;
    std::string id, text;  // text: of the content or reasoning, or the arguments
    std::string call_id, name;
  };

  std::optional<ApiError> parse(const Json& body) override {
    return parse_response(body, context_.defaults, &request_, &told_);
  }
  const char* format_param() const override { return "text"; }
  std::string stream_error(const ApiError& e) override {
    Json j{
        {"type", "error"}, {"code", e.code ? Json(*e.code) : Json(e.type)}, {"message", sent_message(e)}, {"param", e.param ? Json(*e.param) : Json()}};
    j["sequence_number"] = sequence_++;
    return "event: error\ndata: " + dump_json(j) + "\n\n";
  }
  std::string stream_end() override { return ""; }

  Json response(const char* status, Json output) const {
    const bool cut = status == std::string_view("incomplete"), done = cut || status == std::string_view("completed");
    Json usage;
    if (done)
      usage = {{"input_tokens", prompt_tokens()},
               {"input_tokens_details", {{"cached_tokens", cached_tokens()}}},
               {"output_tokens", completion_tokens()},
               {"output_tokens_details", {{"reasoning_tokens", choices_[0].reasoning_tokens}}},
               {"total_tokens", prompt_tokens() + completion_tokens()}};
    return {{"id", id_},
            {"object", "response"},
            {"created_at", created_},
            {"status", status},
            {"background", false},
            {"error", nullptr},
            {"incomplete_details", cut ? Json{{"reason", "max_output_tokens"}} : Json()},
            {"instructions", told_.instructions},
            {"max_output_tokens", request_.max_tokens < 0 ? Json() : Json(request_.max_tokens)},
            {"model", request_.model},
            {"output", std::move(output)},
            {"parallel_tool_calls", request_.parallel_tool_calls},
            {"previous_response_id", nullptr},
            {"reasoning", {{"effort", told_.effort}, {"summary", nullptr}}},
            {"store", false},
            {"temperature", request_.sampling.temperature},
            {"text", {{"format", told_.text_format.is_null() ? Json{{"type", "text"}} : told_.text_format}}},
            {"tool_choice", told_.tool_choice.is_null() ? Json("auto") : told_.tool_choice},
            {"tools", told_.tools.is_null() ? Json::array() : told_.tools},
            {"top_p", request_.sampling.top_p},
            {"truncation", "disabled"},
            {"usage", std::move(usage)},
            {"user", nullptr},
            {"metadata", told_.metadata.is_null() ? Json::object() : told_.metadata}};
  }

  static Json part_json(const Item& i, const std::string& text) {
    if (i.kind == ToolPiece::kReasoning) return {{"type", "reasoning_text"}, {"text", text}};
    return {{"type", "output_text"}, {"text", text}, {"annotations", Json::array()}, {"logprobs", Json::array()}};
  }
  static Json item_json(const Item& i, const char* status) {
    const bool begun = status == std::string_view("in_progress");
    if (i.kind == ToolPiece::kCallBegin)
      return {{"id", i.id},           {"type", "function_call"}, {"status", status},
              {"call_id", i.call_id}, {"name", i.name},          {"arguments", begun ? "" : i.text}};
    Json content = Json::array();
    if (!begun) content.push_back(part_json(i, i.text));
    if (i.kind == ToolPiece::kReasoning)
      return {
          {"id", i.id}, {"type", "reasoning"}, {"status", status}, {"summary", Json::array()}, {"content", content}};
    return {{"id", i.id}, {"type", "message"}, {"status", status}, {"role", "assistant"}, {"content", content}};
  }

  void send(const char* type, Json more) {
    Json j{{"type", type}, {"sequence_number", sequence_++}};
    j.update(more);
    send_named_event(type, j);
  }
  Json place() const { return {{"item_id", items_.back().id}, {"output_index", items_.size() - 1}}; }
  Json place_of_part() const {
    Json j = place();
    j["content_index"] = 0;
    return j;
  }
  static Json with(Json j, const char* key, Json value) {
    j[key] = std::move(value);
    return j;
  }

  void on_start() override {
    send("response.created", {{"response", response("in_progress", Json::array())}});
    send("response.in_progress", {{"response", response("in_progress", Json::array())}});
  }

  void open_item(ToolPiece::Kind kind) {
    Item i{kind, {}, {}, {}, {}};
    if (kind == ToolPiece::kCallBegin) {
      i.id = new_id("fc");
      i.call_id = choices_[0].calls.back().id;
      i.name = choices_[0].calls.back().name;
    } else {
      i.id = new_id(kind == ToolPiece::kReasoning ? "rs" : "msg");
    }
    items_.push_back(std::move(i));
    open_ = true;
    if (!stream_) return;
    send("response.output_item.added",
         {{"output_index", items_.size() - 1}, {"item", item_json(items_.back(), "in_progress")}});
    if (kind != ToolPiece::kCallBegin)
      send("response.content_part.added", with(place_of_part(), "part", part_json(items_.back(), "")));
  }
  void close_item(const char* status = "completed") {
    if (!open_) return;
    open_ = false;
    if (!stream_) return;
    const Item& i = items_.back();
    if (i.kind == ToolPiece::kCallBegin) {
      send("response.function_call_arguments.done", with(with(place(), "name", i.name), "arguments", i.text));
    } else {
      Json done = with(place_of_part(), "text", i.text);
      if (i.kind == ToolPiece::kContent) done["logprobs"] = Json::array();
      send(i.kind == ToolPiece::kReasoning ? "response.reasoning_text.done" : "response.output_text.done",
           std::move(done));
      send("response.content_part.done", with(place_of_part(), "part", part_json(i, i.text)));
    }
    send("response.output_item.done", {{"output_index", items_.size() - 1}, {"item", item_json(i, status)}});
  }

  void on_piece(size_t, const ToolPiece& p, Json) override { add(p.kind, p.text); }
  void add(ToolPiece::Kind kind, const std::string& text) {
    const ToolPiece::Kind item = kind == ToolPiece::kArguments ? ToolPiece::kCallBegin : kind;
    if (kind == ToolPiece::kCallBegin || !open_ || items_.back().kind != item) {
      close_item();
      open_item(item);
    }
    if (kind == ToolPiece::kCallBegin) return;
    items_.back().text += text;
    if (!stream_) return;
    Json delta = with(kind == ToolPiece::kArguments ? place() : place_of_part(), "delta", text);
    if (kind == ToolPiece::kContent) delta["logprobs"] = Json::array();
    send(kind == ToolPiece::kArguments   ? "response.function_call_arguments.delta"
         : kind == ToolPiece::kReasoning ? "response.reasoning_text.delta"
                                         : "response.output_text.delta",
         std::move(delta));
  }
  void on_end(size_t) override {}

  void on_all_finished() override {
    const Choice& c = choices_[0];
    const char* status = c.end.reason == runtime::FinishReason::kLength ? "incomplete" : "completed";
    if (!stream_) {
      // The items as a stream would have made them, each kind in one piece.
      if (!c.reasoning.empty()) add_whole(ToolPiece::kReasoning, c.reasoning);
      if (!c.content.empty()) add_whole(ToolPiece::kContent, c.content);
      for (const Call& call : c.calls)
        items_.push_back({ToolPiece::kCallBegin, new_id("fc"), call.arguments, call.id, call.name});
    }
    // An answer without a word is still an answer.
    if (items_.empty()) open_item(ToolPiece::kContent);
    close_item(status);
    Json output = Json::array();
    for (size_t i = 0; i < items_.size(); ++i)
      output.push_back(item_json(items_[i], i + 1 == items_.size() ? status : "completed"));
    const Json whole = response(status, std::move(output));
    if (!stream_) return respond_whole(whole);
    send(status == std::string_view("incomplete") ? "response.incomplete" : "response.completed",
         {{"response", whole}});
  }
  void add_whole(ToolPiece::Kind kind, const std::string& text) {
    items_.push_back({kind, new_id(kind == ToolPiece::kReasoning ? "rs" : "msg"), text, {}, {}});
  }

  ResponseRequest told_;
  const std::string id_ = new_id("resp");
  std::vector<Item> items_;
  bool open_ = false;
  int64_t sequence_ = 0;
};

}  // namespace

void start_response(ServerContext& c, std::shared_ptr<Exchange> e) {
  std::make_shared<ResponsesJob>(c, e)->begin(e->request().body);
}

}  // namespace mi::server
