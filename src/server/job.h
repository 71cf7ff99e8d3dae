#pragma once
// One API request being answered: its choices run in the step loop, their events come back here, are turned into JSON
// and sent, streamed or whole. Created per request, kept alive by the sinks of its choices.

// clang-format off
#include <utility>  // Boost.Asio 1.74 uses std::exchange without including it
// clang-format on

#include <boost/asio/strand.hpp>
#include <memory>
#include <string>
#include <vector>

#include "server/context.h"
#include "server/http/exchange.h"
#include "server/openai/error.h"
#include "server/openai/render.h"

namespace mi::server {

class Job : public std::enable_shared_from_this<Job> {
 public:
  Job(ServerContext& c, std::shared_ptr<Exchange> e);
  virtual ~Job() = default;

 protected:
  // Submits all or none; the answer to a refusal is sent here.
  void start(std::vector<runtime::Request> requests, bool stream);
  void fail(const ApiError& e);
  void send_event(const Json& j);  // one SSE event

  void send_named_event(const char* name, const Json& j);

  // What the dialect does in its own way.
  virtual const char* format_param() const { return "response_format"; }  // where it asks for the form of the answer
  // Which field the grammar of the answer comes from.
  virtual const char* grammar_param() const { return format_param(); }
  virtual std::string error_body(const ApiError& e) const { return error_json(e); }
  virtual std::string stream_error(const ApiError& e) { return "data: " + error_body(e) + "\n\ndata: [DONE]\n\n"; }
  virtual std::string stream_end() { return "data: [DONE]\n\n"; }

  // Called in order per choice, all on the job's strand.
  virtual void on_start() {}  // before the first event of a stream
  virtual void on_prompt(size_t choice, const runtime::PromptEvent& e) {}
  virtual void on_embedding(size_t choice, runtime::EmbeddingEvent&& e) {}
  virtual void on_token(size_t choice, const runtime::TokenEvent& e) {}
  virtual void on_finish(size_t choice, const runtime::FinishEvent& e) = 0;
  virtual void on_all_finished() = 0;  // streams: the last events before [DONE]; else: respond_whole()
  void respond_whole(const Json& j);

  int64_t prompt_tokens() const { return prompt_tokens_; }
  int64_t completion_tokens() const { return completion_tokens_; }
  int64_t cached_tokens() const { return cached_tokens_; }  // of the prompts, found instead of computed
  void set_prompt_tokens(int64_t n) { prompt_tokens_ = n; }
  void set_choices_per_prompt(int64_t n) { choices_per_prompt_ = size_t(n); }

  ServerContext& context_;
  bool stream_ = false;

 private:
  void on_event(size_t choice, runtime::Event&& e);
  void record(size_t choice, const runtime::Event& e);
  std::optional<ApiError> failure_of(const runtime::FinishEvent& f, bool gone) const;
  void cancel_all();
  std::shared_ptr<Exchange> exchange_;
  boost::asio::strand<boost::asio::thread_pool::executor_type> strand_;
  std::mutex ids_mutex_;
  std::vector<uint64_t> ids_;
  bool gone_ = false;  // guarded by ids_mutex_
  size_t open_ = 0;
  int64_t prompt_tokens_ = 0, completion_tokens_ = 0, cached_tokens_ = 0;
  size_t choices_per_prompt_ = 1;
  std::string failure_;
  std::vector<std::vector<int32_t>> said_;  // prompt and answer of each choice, where traffic is recorded
};

std::string retry_after(double seconds);  // value of the header

// Refusals of the runtime as the API says them.
ApiError refusal_error(const runtime::Admission& a, const runtime::Limits& limits);

// Text that no tokenizer could make fit, refused before it is tokenized.
std::optional<ApiError> too_long_by_bytes(const ServerContext& c, const char* param, size_t bytes);

ApiError unknown_model(const std::string& name);

// A prompt given as text or as ids.
std::optional<ApiError> prompt_ids(const ServerContext& c, const char* param,
                                   const std::variant<std::string, std::vector<int32_t>>& prompt,
                                   std::vector<int32_t>* ids);

// The grammar that the answer must follow, or nothing. param: the field that asks for it.
std::optional<ApiError> make_format_constraint(const ServerContext& c, const CommonRequest& r, const char* param,
                                               std::unique_ptr<text::Constraint>* out);
// Request `i` of n, without its prompt.
runtime::Request request_of(const CommonRequest& r, int64_t i);

std::string new_id(const char* prefix);
int64_t now_seconds();

using Start = void (*)(ServerContext& c, std::shared_ptr<Exchange> e);
void start_chat(ServerContext& c, std::shared_ptr<Exchange> e);
void start_completion(ServerContext& c, std::shared_ptr<Exchange> e);
void start_message(ServerContext& c, std::shared_ptr<Exchange> e);
void start_count_tokens(ServerContext& c, std::shared_ptr<Exchange> e);
void start_response(ServerContext& c, std::shared_ptr<Exchange> e);
void start_embedding(ServerContext& c, std::shared_ptr<Exchange> e);
void start_tokenize(ServerContext& c, std::shared_ptr<Exchange> e);
void start_detokenize(ServerContext& c, std::shared_ptr<Exchange> e);
void start_apply_template(ServerContext& c, std::shared_ptr<Exchange> e);

}  // namespace mi::server
