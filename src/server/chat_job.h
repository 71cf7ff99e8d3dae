#pragma once
// A chat request being answered, whatever its dialect: template, grammar, generation, and the answer taken apart into
// reasoning, content and calls. A dialect parses its body into request_ and renders what arrives.

#include "server/job.h"

namespace mi::server {

// Template, tokens. Fills `prompt` with the text that the model is given.
std::optional<ApiError> render_chat(const ServerContext& c, const ChatRequest& r, text::Rendered* prompt);
std::optional<ApiError> chat_ids(const ServerContext& c, const text::Rendered& prompt, std::vector<int32_t>* ids);

class ChatJob : public Job {
 public:
  using Job::Job;
  void begin(const std::string& body);

 protected:
  struct Call {
    std::string id, name, arguments;
  };
  struct Choice {
    std::string content, reasoning;
    std::vector<Call> calls;
    runtime::FinishEvent end;
    int64_t reasoning_tokens = 0;
    std::unique_ptr<ToolSplitter> splitter;  // null: all text is content
    bool thinking = false;
  };

  virtual std::optional<ApiError> parse(const Json& body) = 0;  // into request_
  virtual const char* call_id_prefix() const { return "call"; }
  const char* grammar_param() const override;
  // A piece of the answer, already added to the choice; streams only. logprob: of the token that brought it, null if
  // none or already given.
  virtual void on_piece(size_t choice, const ToolPiece& piece, Json logprob) = 0;
  // A token without new text, that has a log-probability; streams only.
  virtual void on_silent(size_t choice, Json logprob) {}
  virtual void on_logprob(size_t choice, Json logprob) {}  // whole answers only
  virtual void on_end(size_t choice) = 0;

  ChatRequest request_;
  std::vector<Choice> choices_;
  const int64_t created_ = now_seconds();

 private:
  std::unique_ptr<ToolSplitter> make_splitter(std::string_view prompt) const;
  std::optional<ApiError> make_constraint(std::unique_ptr<text::Constraint>* out) const;
  std::optional<ApiError> make_requests(std::vector<runtime::Request>* out);
  void add_pieces(size_t index, std::vector<ToolPiece> pieces, Json logprob);
  void on_token(size_t index, const runtime::TokenEvent& e) override;
  void on_finish(size_t index, const runtime::FinishEvent& e) override;
};

}  // namespace mi::server
