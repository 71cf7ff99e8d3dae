#include "server/server.h"

#include <malloc.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <chrono>
#include <iterator>
#include <map>
#include <sstream>

#include "base/version.h"
#include "server/access_log.h"
#include "server/anthropic/request.h"
#include "server/api/openapi.h"
#include "server/api/tables.h"
#include "server/context.h"
#include "server/heartbeat.h"
#include "server/http/listener.h"
#include "server/job.h"
#include "server/keys.h"
#include "server/line_log.h"
#include "server/metrics.h"
#include "server/pages.h"

namespace mi::server {
namespace {

constexpr const char* kJson = "application/json";
// Larger bodies have a thread of their own, one after the other: a schema, or thousands of messages, may keep it for
// seconds, and what they become in memory is there once.
constexpr size_t kSmallBody = size_t(64) << 10;
// What becomes of larger ones the C library would keep after it is freed.
constexpr size_t kTrimBody = size_t(1) << 20;
constexpr const char* kModels = "/v1/models";

// What each POST route does, on a worker.
const std::map<std::string_view, Start>& starts() {
  static const std::map<std::string_view, Start> m = {{"/v1/chat/completions", start_chat},
                                                      {"/v1/completions", start_completion},
                                                      {"/v1/responses", start_response},
                                                      {"/v1/messages", start_message},
                                                      {"/v1/messages/count_tokens", start_count_tokens},
                                                      {"/v1/embeddings", start_embedding},
                                                      {"/tokenize", start_tokenize},
                                                      {"/detokenize", start_detokenize},
                                                      {"/apply-template", start_apply_template}};
  return m;
}
std::vector<std::string> methods_of(const RouteSpec& r) {
  std::istringstream words(r.methods);
  return {std::istream_iterator<std::string>(words), {}};
}

ApiError plain_error(int status, std::string message, std::optional<std::string> code = {}) {
  return {status, std::move(message), status >= 500 ? "server_error" : "invalid_request_error", {}, std::move(code)};
}

class Api : public ApiServer {
 public:
  Api(runtime::EngineLoop& loop, text::ModelText text, ServeOptions o)
      : options_(std::move(o)), workers_(static_cast<size_t>(options_.worker_threads)) {
    context_.loop = &loop;
    context_.text = std::move(text);
    context_.model_names = options_.model_names;
    context_.created = now_seconds();
    context_.workers = &workers_;
    context_.defaults = sampling_defaults(context_.text.generation);
  }
  ~Api() override {
    stop(0);
    heartbeat_.reset();  // asks the http server, which is still there, if ended
  }

  Status begin() {
    if (const text::Tokenizer* t = context_.text.tokenizer.get()) {
      MI_TRY(context_.constraints,
             text::ConstraintFactory::make(context_.text.tokenizer, options_.eos_ids, options_.vocab));
      context_.format = detect_format(context_.text.chat_source, *t);
      for (const std::string& mark : context_.format.tokens)
        if (const int32_t id = t->id_of(mark); id >= 0 && t->is_special(id)) context_.shown_special.push_back(id);
      for (int64_t id = 0; id < t->vocab(); ++id)
        context_.longest_token = std::max(context_.longest_token, int64_t(t->token_bytes(int32_t(id)).size()));
    }
    context_.model_facts = options_.model_facts;
    context_.timeout_seconds = options_.timeout_seconds;
    context_.experts = options_.experts;
    context_.fallbacks = options_.fallbacks;
    context_.model_facts["tool_calls"] = context_.format.name;
    context_.model_facts["reasoning"] = !context_.format.think.empty() || context_.format.name == "harmony";
    context_.model_facts["chat_template"] = context_.text.chat != nullptr;
    context_.model_facts["embedding_size"] = context_.loop->limits().hidden;
    openapi_ = dump_json(openapi(version(), options_.model_names, !options_.api_key_file.empty()));
    for (const RouteSpec& r : routes())
      MI_CHECK((r.body != nullptr) == (starts().count(r.path) == 1), "route {} has a body and no handler, or no body",
               r.path);
    HttpHandlers h;
    h.early = [this](const HttpRequest& r) { return early(r); };
    h.headers = [this](const HttpRequest& r) { return options_.cors.headers(r); };
    h.handle = [this](std::shared_ptr<Exchange> e) { handle(std::move(e)); };
    h.error_body = [](int status, const std::string& message) { return error_json(plain_error(status, message)); };
    if (!options_.api_key_file.empty()) {
      MI_TRY(KeyRing keys, KeyRing::read(options_.api_key_file));
      keys_ = std::make_shared<const KeyRing>(std::move(keys));
    }
    if (!options_.access_log.empty()) {
      MI_TRY(log_, LineLog::open("--access-log", options_.access_log));
      context_.access_log = log_.get();
    }
    if (!options_.record_traffic.empty()) {
      MI_TRY(traffic_, LineLog::open("--record-traffic", options_.record_traffic));
      context_.traffic = traffic_.get();
    }
    h.done = [this](const AccessRecord& r) {
      // Counted where it is logged, so that both say the same.
      const RouteSpec* route = find_route(r.request.path);
      const int status = r.error_status != 0 ? r.error_status : r.status;
      if (route && route->body && status != 0) context_.count(route->id, status);
      if (log_) log_->write(access_line(r));
    };
    std::shared_ptr<TlsContext> tls;
    if (has_tls()) {
      MI_TRY(tls, read_tls(options_.tls_cert, options_.tls_key));
    }
    int listener = options_.listener;
    if (listener < 0) {
      MI_TRY(listener, bind_listener(options_.host, options_.port));
    }
    if (options_.before_ready) options_.before_ready();
    MI_TRY_VOID(listen_on(listener));
    address_ = bound_address(listener);
    heartbeat_ = std::make_unique<Heartbeat>();
    context_.restarts = heartbeat_->restarts();
    http_ = HttpServer::start(listener, options_.http, std::move(h), std::move(tls));
    context_.http = &http_->counters();
    heartbeat_->begin(std::clamp(options_.stuck_seconds / 5, 0.1, 5.0), [this] { return alive(); });
    return {};
  }

  std::string url() const override {
    const bool v6 = address_.host.find(':') != std::string::npos;
    return fmt::format("{}://{}:{}", has_tls() ? "https" : "http", v6 ? "[" + address_.host + "]" : address_.host,
                       address_.port);
  }

  bool can_reload() const override {
    return has_tls() || !options_.api_key_file.empty() || (log_ && options_.access_log != "-") ||
           (traffic_ && options_.record_traffic != "-");
  }

  Status reload() override {
    // All is read first: all of it is taken, or nothing.
    std::shared_ptr<const KeyRing> ring;
    decltype(read_tls(options_.tls_cert, options_.tls_key).value()) tls = nullptr;
    if (!options_.api_key_file.empty()) {
      MI_TRY(KeyRing keys, KeyRing::read(options_.api_key_file));
      ring = std::make_shared<const KeyRing>(std::move(keys));
    }
    if (has_tls()) {
      MI_TRY(tls, read_tls(options_.tls_cert, options_.tls_key));
    }
    if (log_) MI_TRY_VOID(log_->reopen());
    if (traffic_) MI_TRY_VOID(traffic_->reopen());
    if (ring) std::atomic_store(&keys_, std::move(ring));
    if (tls) http_->set_tls(std::move(tls));
    return {};
  }

  void stop(double drain_seconds) override {
    if (stopped_ || !http_) return;
    stopped_ = true;
    context_.draining = true;
    heartbeat_->stopping();
    http_->stop_accepting();
    context_.loop->drain(std::chrono::milliseconds(int64_t(drain_seconds * 1000)));
    http_->shut_down(drain_seconds > 0 ? 5 : 0);
    large_.join();
    workers_.join();
  }

 private:
  static EarlyAnswer refuse(const RouteSpec* route, int status, const std::string& message, Headers headers = {},
                            std::optional<std::string> code = {}) {
    const ApiError e = plain_error(status, message, std::move(code));
    const bool anthropic = route && route->dialect == Dialect::kAnthropic;
    return {status, anthropic ? anthropic_error_json(e) : error_json(e), std::move(headers)};
  }

  bool has_tls() const { return !options_.tls_cert.empty(); }

  bool is_stuck() const { return context_.loop->stats().seconds_since_progress > options_.stuck_seconds; }

  // On the heartbeat's thread: the io thread has taken up what it was given last time, and the model gets on.
  bool alive() {
    if (io_answered_->exchange(false)) {
      http_->ping([answered = io_answered_] { *answered = true; });
      io_alive_ = true;
    } else {
      io_alive_ = false;
    }
    return io_alive_ && !is_stuck();
  }

  // Pages are for browsers, not a part of the API that /openapi.json describes.
  static const RouteSpec& page_route() {
    static const RouteSpec page{"/ui", "GET HEAD", "page", "A page for people."};
    return page;
  }
  const RouteSpec* find(const std::string& path) const {
    if (const RouteSpec* r = find_route(path)) return r;
    return options_.ui && find_page(path) ? &page_route() : nullptr;
  }

  EarlyAnswer early(const HttpRequest& r) {
    if (auto answer = options_.cors.preflight(r)) return std::move(*answer);
    const RouteSpec* route = find(r.path);
    const auto keys = std::atomic_load(&keys_);
    if (keys && !(route && route->open) && !keys->admits(r))
      return refuse(
          route, 401, "a valid API key is needed: Authorization: Bearer KEY",
          {{"WWW-Authenticate", route == &page_route()
                                    ? R"(Basic realm="metainfer: any name, an API key as password", charset="UTF-8")"
                                    : "Bearer"}},
          "invalid_api_key");
    if (!route) return refuse(route, 404, "there is nothing at this path; /openapi.json describes the API");
    const std::vector<std::string> methods = methods_of(*route);
    if (std::find(methods.begin(), methods.end(), r.method) == methods.end()) {
      std::string allow;
      for (const std::string& m : methods) allow += (allow.empty() ? "" : ", ") + m;
      return refuse(route, 405, fmt::format("this path answers {}", allow), {{"Allow", allow}});
    }
    if (context_.draining && r.method == "POST")
      return refuse(route, 503, "the server is shutting down", {{"Retry-After", "5"}}, "server_draining");
    return {};
  }

  Json model_json(const std::string& name) const {
    return {{"id", name},
            {"object", "model"},
            {"created", context_.created},
            {"owned_by", "metainfer"},
            {"max_model_len", options_.max_seq_len},
            {"details", context_.model_facts}};
  }

  void answer_tokenizer_info(Exchange& e) const {
    if (!context_.text.tokenizer)
      return e.respond(404, kJson, error_json(plain_error(404, "this model has no tokenizer")));
    const auto or_null = [](const std::string& s) { return s.empty() ? Json() : Json(s); };
    const text::TemplateVars& t = context_.text.tokens;
    e.respond(200, kJson,
              dump_json(Json{{"tokenizer_class", "metainfer"},
                             {"vocab_size", context_.text.tokenizer->vocab()},
                             {"add_bos_token", false},
                             {"bos_token", or_null(t.bos_token)},
                             {"eos_token", or_null(t.eos_token)},
                             {"pad_token", or_null(t.pad_token)},
                             {"unk_token", or_null(t.unk_token)},
                             {"chat_template", or_null(context_.text.chat_source)}}));
  }

  void handle(std::shared_ptr<Exchange> e) {
    const std::string& path = e->request().path;
    if (path == "/health") {
      // 503 is for whoever restarts what is stuck; a server that drains is healthy.
      is_stuck() ? e->respond(503, kJson, R"({"status":"stuck"})") : e->respond(200, kJson, R"({"status":"ok"})");
    } else if (path == "/ready") {
      const bool draining = context_.draining;
      if (draining || is_stuck())
        e->respond(503, kJson, draining ? R"({"status":"draining"})" : R"({"status":"stuck"})");
      else
        e->respond(200, kJson, R"({"status":"ready"})");
    } else if (path == "/version") {
      e->respond(200, kJson, dump_json(Json{{"version", version()}, {"name", "metainfer"}}));
    } else if (path == "/tokenizer_info") {
      answer_tokenizer_info(*e);
    } else if (path == "/openapi.json") {
      e->respond(200, kJson, openapi_);
    } else if (const UiFile* file = options_.ui ? find_page(path) : nullptr) {
      send_page(*e, *file);
    } else if (path == "/metrics") {
      e->respond(200, "text/plain; version=0.0.4; charset=utf-8", metrics_text(context_));
    } else if (path == kModels) {
      e->respond(
          200, kJson,
          dump_json(Json{{"object", "list"}, {"data", Json::array({model_json(context_.model_names.front())})}}));
    } else if (path.rfind(kModels, 0) == 0) {
      const std::string name = path.substr(std::string(kModels).size() + 1);
      if (context_.serves(name))
        e->respond(200, kJson, dump_json(model_json(name)));
      else
        e->respond(404, kJson,
                   error_json(plain_error(404, fmt::format("the model '{}' does not exist here", shortened(name)),
                                          "model_not_found")));
    } else {
      const size_t size = e->request().body.size();
      boost::asio::post(size > kSmallBody ? large_ : workers_, [this, e, size, start = starts().at(path)] {
        start(context_, e);
        if (size > kTrimBody) malloc_trim(0);
      });
    }
  }

  ServeOptions options_;
  boost::asio::thread_pool workers_;
  boost::asio::thread_pool large_{1};
  ServerContext context_;
  std::string openapi_;
  std::shared_ptr<const KeyRing> keys_;  // null: no key needed; read and replaced atomically
  std::unique_ptr<LineLog> log_, traffic_;  // outlive who writes to them: the http server, the workers
  BoundAddress address_;
  std::unique_ptr<HttpServer> http_;
  std::shared_ptr<std::atomic<bool>> io_answered_ = std::make_shared<std::atomic<bool>>(true);
  bool io_alive_ = true;
  std::unique_ptr<Heartbeat> heartbeat_;
  bool stopped_ = false;
};

}  // namespace

Result<std::unique_ptr<ApiServer>> ApiServer::start(runtime::EngineLoop& loop, text::ModelText text,
                                                    ServeOptions options) {
  MI_CHECK(!options.model_names.empty());
  auto a = std::make_unique<Api>(loop, std::move(text), std::move(options));
  MI_TRY_VOID(a->begin());
  return std::unique_ptr<ApiServer>(std::move(a));
}

}  // namespace mi::server
