#include "server/job.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <chrono>
#include <cmath>
#include <random>

#include "server/line_log.h"

namespace mi::server {

void ServerContext::count(const std::string& endpoint, int status) {
  std::lock_guard lock(count_mutex);
  for (auto& [key, n] : api_requests)
    if (key.first == endpoint && key.second == status) {
      ++n;
      return;
    }
  api_requests.push_back({{endpoint, status}, 1});
}

bool ServerContext::serves(const std::string& model) const {
  for (const std::string& n : model_names)
    if (n == model) return true;
  return false;
}

std::string new_id(const char* prefix) {
  static thread_local std::mt19937_64 rng{std::random_device{}()};
  return fmt::format("{}-{:016x}{:08x}", prefix, rng(), uint32_t(rng()));
}

int64_t now_seconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

ApiError refusal_error(const runtime::Admission& a, const runtime::Limits& limits) {
  ApiError e;
  e.message = a.message;
  if (!a.param.empty()) e.param = a.param;
  switch (a.refusal) {
    case runtime::Refusal::kTooLong:
      e.code = "context_length_exceeded";
      e.message = fmt::format("this model's maximum context length is {} tokens: {}", limits.longest(), a.message);
      break;
    case runtime::Refusal::kQueueFull:
      e.status = 429;
      e.type = "rate_limit_error";
      e.code = "rate_limit_exceeded";
      e.retry_after = a.retry_after;
      break;
    case runtime::Refusal::kDraining:
      e.status = 503;
      e.type = "server_error";
      e.code = "server_draining";
      break;
    default:
      break;
  }
  return e;
}

std::optional<ApiError> too_long_by_bytes(const ServerContext& c, const char* param, size_t bytes) {
  const int64_t tokens = int64_t(bytes) / c.longest_token;
  if (tokens <= c.loop->limits().longest()) return std::nullopt;
  runtime::Admission a;
  a.refusal = runtime::Refusal::kTooLong;
  a.param = param;
  a.message = fmt::format("the text has {} bytes, at least {} tokens", bytes, tokens);
  return refusal_error(a, c.loop->limits());
}

std::optional<ApiError> prompt_ids(const ServerContext& c, const char* param,
                                   const std::variant<std::string, std::vector<int32_t>>& prompt,
                                   std::vector<int32_t>* ids) {
  if (const auto* given = std::get_if<std::vector<int32_t>>(&prompt)) {
    *ids = *given;
    for (int32_t id : *ids)
      if (id >= c.loop->limits().vocab)
        return bad_field(
            param, fmt::format("{} holds token {}; the vocabulary has {} tokens", param, id, c.loop->limits().vocab));
    return std::nullopt;
  }
  const std::string& text = std::get<std::string>(prompt);
  if (auto e = too_long_by_bytes(c, param, text.size())) return e;
  auto encoded = c.text.tokenizer->encode(text, true);
  if (!encoded.ok()) return bad_field(param, encoded.error().message());
  *ids = std::move(encoded).value();
  return std::nullopt;
}

std::optional<ApiError> make_format_constraint(const ServerContext& c, const CommonRequest& r, const char* param,
                                               std::unique_ptr<text::Constraint>* out) {
  Result<std::unique_ptr<text::Constraint>> made = std::unique_ptr<text::Constraint>();
  switch (r.format) {
    case AnswerFormat::kText:
      break;
    case AnswerFormat::kJsonObject:
      made = c.constraints->json_object();
      break;
    case AnswerFormat::kJsonSchema:
      made = c.constraints->json_schema(dump_json(r.schema));
      break;
    case AnswerFormat::kLark:
      made = c.constraints->lark(r.grammar);
      break;
    case AnswerFormat::kRegex:
      made = c.constraints->regex(r.grammar);
      break;
  }
  if (!made.ok()) return bad_field(param, fmt::format("{}: {}", param, made.error().message()));
  *out = std::move(made).value();
  return std::nullopt;
}

runtime::Request request_of(const CommonRequest& c, int64_t i) {
  runtime::Request r;
  r.sampling = c.sampling;
  // Choices of one seeded request differ from each other, and are the same each time.
  if (r.sampling.seed) *r.sampling.seed += uint64_t(i);
  r.max_tokens = c.max_tokens;
  r.stop = c.stop;
  r.stop_token_ids = c.stop_token_ids;
  r.skip_special_tokens = c.skip_special_tokens;
  r.priority = c.priority;
  r.cache_salt = c.cache_salt;
  return r;
}

ApiError unknown_model(const std::string& name) {
  return {404, fmt::format("the model '{}' does not exist here; /v1/models lists what does", shortened(name)),
          "invalid_request_error", "model", "model_not_found"};
}

Job::Job(ServerContext& c, std::shared_ptr<Exchange> e)
    : context_(c), exchange_(std::move(e)), strand_(boost::asio::make_strand(c.workers->get_executor())) {}

// Whole seconds, as HTTP wants them, and never at once: whoever was refused would only be refused again.
std::string retry_after(double seconds) {
  return std::to_string(int64_t(std::clamp(std::ceil(seconds), 1.0, 86400.0)));
}

void Job::fail(const ApiError& e) {
  exchange_->respond(e.status, "application/json", error_body(e),
                     e.status == 429 ? Headers{{"Retry-After", retry_after(e.retry_after)}} : Headers{});
}

void Job::cancel_all() {
  std::vector<uint64_t> ids;
  {
    std::lock_guard lock(ids_mutex_);
    gone_ = true;
    ids = ids_;
  }
  for (uint64_t id : ids) context_.loop->cancel(id);
}

// Runs on the strand, so that no event overtakes the decisions made here.
void Job::start(std::vector<runtime::Request> requests, bool stream) {
  stream_ = stream;
  boost::asio::post(strand_, [self = shared_from_this(),
                              requests = std::make_shared<std::vector<runtime::Request>>(std::move(requests))] {
    self->open_ = requests->size();
    if (self->context_.traffic)
      for (const runtime::Request& r : *requests) self->said_.push_back(r.prompt);
    for (size_t i = 0; i < requests->size(); ++i) {
      (*requests)[i].timeout_seconds = self->context_.timeout_seconds;
      const runtime::Admission a =
          self->context_.loop->submit(std::move((*requests)[i]), [self, i](runtime::Event&& e) {
            boost::asio::post(self->strand_, [self, i, e = std::make_shared<runtime::Event>(std::move(e))] {
              self->on_event(i, std::move(*e));
            });
          });
      if (!a.ok()) {
        self->failure_ = a.message.empty() ? "refused" : a.message;
        self->cancel_all();
        self->fail(refusal_error(a, self->context_.loop->limits()));
        return;
      }
      std::lock_guard lock(self->ids_mutex_);
      self->ids_.push_back(a.id);
    }
    self->exchange_->on_gone([weak = self->weak_from_this()] {
      if (const auto s = weak.lock()) s->cancel_all();
    });
    if (self->stream_) {
      self->exchange_->begin_stream("text/event-stream; charset=utf-8");
      self->on_start();
    }
  });
}

// What an end means for who asked; nothing if it is an answer, or if nobody is there to hear.
std::optional<ApiError> Job::failure_of(const runtime::FinishEvent& f, bool gone) const {
  switch (f.reason) {
    case runtime::FinishReason::kStop:
    case runtime::FinishReason::kLength:
      return std::nullopt;
    case runtime::FinishReason::kCancelled:
      if (gone) return std::nullopt;
      return ApiError{500, "the server is shutting down", "server_error", {}, {}};
    case runtime::FinishReason::kError:
      return ApiError{500, f.message, "server_error", {}, {}};
    case runtime::FinishReason::kTimeout:
      return ApiError{
          504,
          fmt::format("the answer was not complete after {} s, the limit of this server (--timeout-seconds)",
                      context_.timeout_seconds),
          "timeout_error",
          {},
          {}};
    case runtime::FinishReason::kInvalid:
      break;
  }
  return bad_field(grammar_param(), fmt::format("{}: {}", grammar_param(), f.message));
}

void Job::on_event(size_t choice, runtime::Event&& event) {
  const bool quiet = !failure_.empty();  // the answer was an error: events of cancelled choices are not shown
  if (context_.traffic) record(choice, event);
  if (const auto* p = std::get_if<runtime::PromptEvent>(&event)) {
    if (!quiet) on_prompt(choice, *p);
  } else if (auto* v = std::get_if<runtime::EmbeddingEvent>(&event)) {
    if (!quiet) on_embedding(choice, std::move(*v));
  } else if (const auto* t = std::get_if<runtime::TokenEvent>(&event)) {
    if (!quiet) on_token(choice, *t);
  } else {
    const auto& f = std::get<runtime::FinishEvent>(event);
    completion_tokens_ += f.completion_tokens;
    if (choice % choices_per_prompt_ == 0) cached_tokens_ += f.reused_tokens;
    --open_;
    if (quiet) return;
    bool gone;
    {
      std::lock_guard lock(ids_mutex_);
      gone = gone_;
    }
    if (const auto e = failure_of(f, gone)) {
      failure_ = e->message;
      cancel_all();
      if (stream_) {
        exchange_->set_error_status(e->status);
        exchange_->write(stream_error(*e));
        exchange_->end_stream();
      } else {
        fail(*e);
      }
      return;
    }
    on_finish(choice, f);
    if (open_ > 0) return;
    exchange_->note("prompt_tokens", prompt_tokens_);
    exchange_->note("completion_tokens", completion_tokens_);
    exchange_->note("cached_tokens", cached_tokens_);
    on_all_finished();
    if (stream_) {
      exchange_->write(stream_end());
      exchange_->end_stream();
    }
  }
}

// What was computed for nobody counts too: experts were chosen for it.
void Job::record(size_t choice, const runtime::Event& event) {
  std::vector<int32_t>& ids = said_[choice];
  if (const auto* t = std::get_if<runtime::TokenEvent>(&event)) ids.push_back(t->token);
  if (std::holds_alternative<runtime::FinishEvent>(event)) context_.traffic->write(dump_json({{"ids", ids}}));
}

void Job::send_event(const Json& j) { exchange_->write("data: " + dump_json(j) + "\n\n"); }

void Job::send_named_event(const char* name, const Json& j) {
  exchange_->write(fmt::format("event: {}\ndata: {}\n\n", name, dump_json(j)));
}

void Job::respond_whole(const Json& j) { exchange_->respond(200, "application/json", dump_json(j)); }

}  // namespace mi::server
