#pragma once
// HTTP/1.1 over TCP: accepts connections, bounds and parses requests, hands each to a handler, sends what the handler
// queues. One io thread does all socket work and never runs a handler's slow part; `handle` runs on it and must return
// at once.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/result.h"
#include "server/http/exchange.h"

namespace mi::server {

struct HttpLimits {
  size_t header_bytes = 64 << 10;  // more: 431
  size_t body_bytes = 32 << 20;    // more: 413, before it is read
  size_t queued_bytes = 4 << 20;   // output a client may leave unread before it is cut off
  int idle_seconds = 75;           // between requests of a kept connection
  int read_seconds = 60;           // for one request to arrive whole
  int write_seconds = 60;          // for queued output to make progress
  int max_connections = 1024;
};

// Decides from the request line and headers, before the body is read; a refusal closes the connection if there is a
// body.
struct EarlyAnswer {
  int status = 0;    // 0: go on
  std::string body;  // JSON
  Headers headers;
};

struct HttpHandlers {
  std::function<EarlyAnswer(const HttpRequest&)> early;
  std::function<void(std::shared_ptr<Exchange>)> handle;
  // The JSON body for errors that HTTP itself finds (bad syntax, too large).
  std::function<std::string(int status, const std::string& message)> error_body;
};

class HttpServer {
 public:
  // Binds at once: kEnvironment when the address is in use or may not be bound. port 0: a free one.
  static Result<std::unique_ptr<HttpServer>> listen(const std::string& host, int port, HttpLimits limits,
                                                    HttpHandlers handlers);
  virtual ~HttpServer() = default;
  virtual int port() const = 0;
  // Stops accepting; connections end after their current answer. Returns at once.
  virtual void stop_accepting() = 0;
  // Waits until the open exchanges have been sent, at most `seconds`; then closes everything and joins the thread.
  virtual void shut_down(double seconds) = 0;
};

}  // namespace mi::server
