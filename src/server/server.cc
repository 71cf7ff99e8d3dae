#include "server/server.h"

#include <malloc.h>
#include <openssl/crypto.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <chrono>
#include <iterator>
#include <map>
#include <sstream>

#include "base/file.h"
#include "base/version.h"
#include "server/anthropic/request.h"
#include "server/api/openapi.h"
#include "server/api/tables.h"
#include "server/context.h"
#include "server/job.h"
#include "server/metrics.h"

namespace mi::server {
namespace {

constexpr const char* kJson = "application/json";
// A body of 20 MB can be 1 GB of small JSON values, which the C library would keep after they are freed.
constexpr size_t kLargeBody = size_t(1) << 20;
constexpr const char* kModels = "/v1/models";
// A step takes seconds at most; a loop that has work and ends none for so long is stuck.
constexpr double kStuckSeconds = 120;

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
  ~Api() override { stop(0); }

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
    context_.model_facts["tool_calls"] = context_.format.name;
    context_.model_facts["reasoning"] = !context_.format.think.empty() || context_.format.name == "harmony";
    context_.model_facts["chat_template"] = context_.text.chat != nullptr;
    context_.model_facts["embedding_size"] = context_.loop->limits().hidden;
    openapi_ = dump_json(openapi(version(), options_.model_names, !options_.api_keys.empty()));
    for (const RouteSpec& r : routes())
      MI_CHECK((r.body != nullptr) == (starts().count(r.path) == 1), "route {} has a body and no handler, or no body",
               r.path);
    HttpHandlers h;
    h.early = [this](const HttpRequest& r) { return early(r); };
    h.handle = [this](std::shared_ptr<Exchange> e) { handle(std::move(e)); };
    h.error_body = [](int status, const std::string& message) { return error_json(plain_error(status, message)); };
    MI_TRY(http_, HttpServer::listen(options_.host, options_.port, options_.http, std::move(h)));
    return {};
  }

  std::string url() const override {
    const bool v6 = options_.host.find(':') != std::string::npos;
    return fmt::format("http://{}:{}", v6 ? "[" + options_.host + "]" : options_.host, http_->port());
  }

  void stop(double drain_seconds) override {
    if (stopped_ || !http_) return;
    stopped_ = true;
    context_.draining = true;
    http_->stop_accepting();
    context_.loop->drain(std::chrono::milliseconds(int64_t(drain_seconds * 1000)));
    http_->shut_down(drain_seconds > 0 ? 5 : 0);
    workers_.join();
  }

 private:
  static EarlyAnswer refuse(const RouteSpec* route, int status, const std::string& message, Headers headers = {},
                            std::optional<std::string> code = {}) {
    const ApiError e = plain_error(status, message, std::move(code));
    const bool anthropic = route && route->dialect == Dialect::kAnthropic;
    return {status, anthropic ? anthropic_error_json(e) : error_json(e), std::move(headers)};
  }

  // Equal time whatever the difference; every key is looked at.
  bool key_is_known(const std::string& given) const {
    bool found = false;
    for (const std::string& key : options_.api_keys)
      found |= key.size() == given.size() && CRYPTO_memcmp(key.data(), given.data(), key.size()) == 0;
    return found;
  }

  EarlyAnswer early(const HttpRequest& r) {
    const RouteSpec* route = find_route(r.path);
    if (!options_.api_keys.empty() && !(route && route->open)) {
      bool ok = false;
      if (r.authorization.size() == 1) {
        const std::string& a = r.authorization[0];
        std::string scheme = a.substr(0, 7);
        std::transform(scheme.begin(), scheme.end(), scheme.begin(),
                       [](unsigned char c) { return char(std::tolower(c)); });
        ok = scheme == "bearer " && key_is_known(a.substr(7));
      }
      if (!ok)
        return refuse(route, 401, "a valid API key is needed: Authorization: Bearer KEY",
                      {{"WWW-Authenticate", "Bearer"}}, "invalid_api_key");
    }
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

  void answer_ready(Exchange& e) const {
    const runtime::Stats s = context_.loop->stats();
    const int64_t places = options_.max_in_flight;
    const char* status = context_.draining || s.draining                 ? "draining"
                         : s.seconds_since_progress > kStuckSeconds      ? "stuck"
                         : places > 0 && s.running + s.waiting >= places ? "full"
                                                                         : "ready";
    e.respond(status == std::string_view("ready") ? 200 : 503, kJson, dump_json(Json{{"status", status}}));
  }

  void handle(std::shared_ptr<Exchange> e) {
    const std::string& path = e->request().path;
    if (path == "/health") {
      e->respond(200, kJson, R"({"status":"ok"})");
    } else if (path == "/ready") {
      answer_ready(*e);
    } else if (path == "/version") {
      e->respond(200, kJson, dump_json(Json{{"version", version()}, {"name", "metainfer"}}));
    } else if (path == "/tokenizer_info") {
      answer_tokenizer_info(*e);
    } else if (path == "/openapi.json") {
      e->respond(200, kJson, openapi_);
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
      boost::asio::post(workers_, [this, e, start = starts().at(path)] {
        const bool large = e->request().body.size() > kLargeBody;
        start(context_, e);
        if (large) malloc_trim(0);
      });
    }
  }

  ServeOptions options_;
  boost::asio::thread_pool workers_;
  ServerContext context_;
  std::string openapi_;
  std::unique_ptr<HttpServer> http_;
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

Result<std::vector<std::string>> read_api_keys(const std::string& file) {
  MI_TRY(const std::string content, read_file(file, size_t(1) << 20));
  std::vector<std::string> keys;
  std::istringstream lines(content);
  for (std::string line; std::getline(lines, line);) {
    while (!line.empty() && isspace(static_cast<unsigned char>(line.back()))) line.pop_back();
    if (!line.empty() && line[0] != '#') keys.push_back(line);
  }
  if (keys.empty()) return bad_input("{}: holds no API key (one a line)", file);
  return keys;
}

}  // namespace mi::server
