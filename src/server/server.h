#pragma once
// The server over a step loop, in the dialects of OpenAI and Anthropic. Routes, keys, graceful end.

#include <memory>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/result.h"
#include "runtime/loop.h"
#include "server/http/http_server.h"
#include "text/model_text.h"

namespace mi::server {

struct ServeOptions {
  std::string host = "127.0.0.1";
  int port = 8000;                       // 0: a free one
  std::vector<std::string> model_names;  // accepted as "model"; the first is listed
  std::vector<std::string> api_keys;     // empty: no key needed
  int64_t vocab = 0;                     // of the logits
  std::vector<int64_t> eos_ids;
  int64_t max_seq_len = 0;            // what /v1/models tells
  int64_t max_in_flight = 0;          // requests that run or wait before more are refused; 0: no limit. For /ready
  Json model_facts = Json::object();  // further facts for /v1/models
  int worker_threads = 2;             // templates, tokenizing, rendering
  HttpLimits http;
};

class ApiServer {
 public:
  // The loop must outlive the server. Listens when it returns.
  static Result<std::unique_ptr<ApiServer>> start(runtime::EngineLoop& loop, text::ModelText text,
                                                  ServeOptions options);
  virtual ~ApiServer() = default;
  virtual std::string url() const = 0;
  // New work is answered with 503, running answers go on up to drain_seconds; then everything closes.
  virtual void stop(double drain_seconds) = 0;
};

// One key a line; blank lines and lines that begin with # are skipped. Refuses a file without keys.
Result<std::vector<std::string>> read_api_keys(const std::string& file);

}  // namespace mi::server
