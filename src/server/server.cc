#include "server/server.h"

#include <malloc.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <chrono>

#include "server/access_log.h"
#include "server/context.h"
#include "server/heartbeat.h"
#include "server/http/listener.h"
#include "server/job.h"
#include "server/keys.h"
#include "server/metrics.h"
#include "server/pages.h"

namespace mi::server {
namespace {

constexpr const char* kJson = "application/json";
// A body of 20 MB can be 1 GB of small JSON values, which the C library would keep after they are freed.
constexpr size_t kLargeBody = size_t(1) << 20;
constexpr const char* kModels = "/v1/models";

struct Route {
  const char* path;
  std::vector<const char*> methods;
  bool open = false;  // needs no key
  bool page = false;  // for browsers, which are told to ask for the key
};
const std::vector<Route>& routes() {
  static const std::vector<Route> r = {
      {"/health", {"GET", "HEAD"}, true}, {"/ready", {"GET", "HEAD"}, true},  {"/metrics", {"GET"}},
      {kModels, {"GET", "HEAD"}},         {"/v1/chat/completions", {"POST"}}, {"/v1/completions", {"POST"}}};
  return r;
}
// "/v1/models/NAME" stands for the listing's route.
const Route* find_route(const std::string& path) {
  for (const Route& r : routes())
    if (path == r.path) return &r;
  static const Route one_model{"/v1/models/{id}", {"GET", "HEAD"}};
  const std::string prefix = std::string(kModels) + "/";
  return path.rfind(prefix, 0) == 0 && path.size() > prefix.size() && path.find('/', prefix.size()) == std::string::npos
             ? &one_model
             : nullptr;
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
    heartbeat_.reset();  // asks the http server
    stop(0);
  }

  Status begin() {
    if (const text::Tokenizer* t = context_.text.tokenizer.get()) {
      MI_TRY(context_.constraints,
             text::ConstraintFactory::make(context_.text.tokenizer, options_.eos_ids, options_.vocab));
      context_.marks = call_marks(*t);
      for (int64_t id = 0; id < t->vocab(); ++id)
        context_.longest_token = std::max(context_.longest_token, int64_t(t->token_bytes(int32_t(id)).size()));
    }
    HttpHandlers h;
    h.early = [this](const HttpRequest& r) { return early(r); };
    h.handle = [this](std::shared_ptr<Exchange> e) { handle(std::move(e)); };
    h.error_body = [](int status, const std::string& message) { return error_json(plain_error(status, message)); };
    if (!options_.api_key_file.empty()) {
      MI_TRY(KeyRing keys, KeyRing::read(options_.api_key_file));
      keys_ = std::make_shared<const KeyRing>(std::move(keys));
    }
    if (!options_.access_log.empty()) {
      MI_TRY(log_, AccessLog::open(options_.access_log));
      h.done = [this](const AccessRecord& r) { log_->write(r); };
      context_.access_log = log_.get();
    }
    std::shared_ptr<TlsContext> tls;
    if (has_tls()) {
      MI_TRY(tls, read_tls(options_.tls_cert, options_.tls_key));
    }
    int listener = options_.listener;
    if (listener < 0) {
      MI_TRY(listener, open_listener(options_.host, options_.port));
    }
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
    return has_tls() || !options_.api_key_file.empty() || (log_ && options_.access_log != "-");
  }

  Status reload() override {
    if (!options_.api_key_file.empty()) {
      MI_TRY(KeyRing keys, KeyRing::read(options_.api_key_file));
      std::atomic_store(&keys_, std::make_shared<const KeyRing>(std::move(keys)));
    }
    if (has_tls()) {
      MI_TRY(auto tls, read_tls(options_.tls_cert, options_.tls_key));
      http_->set_tls(std::move(tls));
    }
    if (log_) MI_TRY_VOID(log_->reopen());
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
    workers_.join();
  }

 private:
  EarlyAnswer refuse(int status, const std::string& message, Headers headers = {},
                     std::optional<std::string> code = {}) {
    return {status, error_json(plain_error(status, message, std::move(code))), std::move(headers)};
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

  const Route* find(const std::string& path) const {
    static const Route page{"/ui", {"GET", "HEAD"}, false, true};
    if (const Route* r = find_route(path)) return r;
    return options_.ui && find_page(path) ? &page : nullptr;
  }

  EarlyAnswer early(const HttpRequest& r) {
    const Route* route = find(r.path);
    const auto keys = std::atomic_load(&keys_);
    if (keys && !(route && route->open) && !keys->admits(r))
      return refuse(
          401, "a valid API key is needed: Authorization: Bearer KEY",
          {{"WWW-Authenticate", route && route->page
                                    ? R"(Basic realm="metainfer: any name, an API key as password", charset="UTF-8")"
                                    : "Bearer"}},
          "invalid_api_key");
    if (!route)
      return refuse(
          404, "there is nothing at this path; the API is at /v1/models, /v1/chat/completions and /v1/completions");
    if (std::find(route->methods.begin(), route->methods.end(), r.method) == route->methods.end()) {
      std::string allow;
      for (const char* m : route->methods) allow += (allow.empty() ? "" : ", ") + std::string(m);
      return refuse(405, fmt::format("this path answers {}", allow), {{"Allow", allow}});
    }
    if (context_.draining && r.method == "POST")
      return refuse(503, "the server is shutting down", {{"Retry-After", "5"}}, "server_draining");
    return {};
  }

  Json model_json(const std::string& name) const {
    return {{"id", name},
            {"object", "model"},
            {"created", context_.created},
            {"owned_by", "metainfer"},
            {"max_model_len", options_.max_seq_len}};
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
                   error_json(plain_error(
                       404, fmt::format("the model '{}' does not exist here", clean_utf8(name.substr(0, 200))),
                       "model_not_found")));
    } else {
      boost::asio::post(workers_, [this, e, chat = path == "/v1/chat/completions"] {
        const bool large = e->request().body.size() > kLargeBody;
        chat ? start_chat(context_, e) : start_completion(context_, e);
        if (large) malloc_trim(0);
      });
    }
  }

  ServeOptions options_;
  boost::asio::thread_pool workers_;
  ServerContext context_;
  std::shared_ptr<const KeyRing> keys_;  // null: no key needed; read and replaced atomically
  std::unique_ptr<AccessLog> log_;       // outlives the http server, which writes to it
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
