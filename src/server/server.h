#pragma once
// The server over a step loop, in the dialects of OpenAI and Anthropic. Routes, keys, graceful end.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/result.h"
#include "runtime/expert_load.h"
#include "runtime/loop.h"
#include "server/cors.h"
#include "server/fallback.h"
#include "server/http/http_server.h"
#include "text/model_text.h"

namespace mi::server {

struct ServeOptions {
  double timeout_seconds = 0;  // of a request, from its arrival; 0: none
  std::string host = "127.0.0.1";
  int port = 8000;                       // 0: a free one
  std::vector<std::string> model_names;  // accepted as "model"; the first is listed
  std::string api_key_file;              // empty: no key needed
  std::string tls_cert, tls_key;         // empty: plain HTTP
  std::string access_log;                // empty: none; "-": standard output
  std::string record_traffic;            // likewise
  bool ui = true;                        // the pages for people
  std::shared_ptr<const runtime::ExpertLoad> experts;  // for /metrics; null: not shown
  Cors cors;                             // whose pages may read the answers
  std::vector<Fallback> fallbacks;       // for /metrics
  int64_t vocab = 0;                     // of the logits
  std::vector<int64_t> eos_ids;
  int64_t max_seq_len = 0;            // what /v1/models tells
  Json model_facts = Json::object();  // further facts for /v1/models
  int worker_threads = 2;             // templates, tokenizing, rendering
  HttpLimits http;
  double stuck_seconds = 120;  // without progress for so long: /health and /ready say 503, no sign of life is given
  int listener = -1;           // a socket that is bound already, and may be listening; -1: host and port
  // Called when nothing can go wrong any more, before anyone can learn that the server is there.
  std::function<void()> before_ready;
};

class ApiServer {
 public:
  // The loop must outlive the server. Listens when it returns.
  static Result<std::unique_ptr<ApiServer>> start(runtime::EngineLoop& loop, text::ModelText text,
                                                  ServeOptions options);
  virtual ~ApiServer() = default;
  virtual std::string url() const = 0;
  // Reads the keys and the certificate again, and opens the access log again; where one fails, the old one stays.
  virtual Status reload() = 0;
  virtual bool can_reload() const = 0;  // there is something to read
  // New work is answered with 503, running answers go on up to drain_seconds; then everything closes.
  virtual void stop(double drain_seconds) = 0;
};

}  // namespace mi::server
