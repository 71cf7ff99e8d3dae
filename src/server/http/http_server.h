#pragma once
// HTTP/1.1 over TCP or TLS: accepts connections, bounds and parses requests, hands each to a handler, sends what the
// handler queues. One io thread does all socket work and never runs a handler's slow part; `handle` runs on it and must
// return at once.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/result.h"
#include "server/http/exchange.h"

namespace mi::server {

struct HttpLimits {
  size_t header_bytes = 64 << 10;     // more: 431
  size_t header_fields = 256;         // more: 431
  size_t body_bytes = 32 << 20;       // more: 413, before it is read
  size_t all_body_bytes = 512 << 20;  // of all requests that are read or answered at one time; more: 503
  // Output that a client may leave unread behind the piece that it is taking: an event may be larger than this.
  size_t queued_bytes = 4 << 20;
  int handshake_seconds = 10;   // of TLS
  int idle_seconds = 75;        // between requests of a kept connection
  int read_seconds = 60;        // for one request to arrive whole; more: 408
  int write_seconds = 60;       // for queued output to make progress
  int keep_alive_seconds = 15;  // an event stream that is silent for so long gets a comment; 0: never
  // Requests at one time, from the end of their head to the end of their answer. Open connections are as many and those
  // of the next two lines; kept ones without a request are closed for new ones as soon as there are max_connections.
  int max_connections = 1024;
  int spare_connections = 32;    // beyond these: only what has no body is answered, so that probes get through
  int heard_connections = 1024;  // beyond those: every request is answered by 503. Further ones: see HttpCounters
  int arriving_seconds = 1;      // a body that takes longer gives up its place when there is no other
};

// Counters since the start, and what is open now. Written by the io thread, read by any.
struct HttpCounters {
  std::atomic<int64_t> open{0}, answering{0};
  std::atomic<uint64_t> accepted{0};
  std::atomic<uint64_t> evicted{0};       // connections without a whole request closed for a new one
  std::atomic<uint64_t> turned_away{0};   // new connections closed unheard, every place being busy
  std::atomic<uint64_t> crowded{0};       // requests answered by 503, every place being taken
  std::atomic<uint64_t> slow_readers{0};  // answers cut off
  std::atomic<uint64_t> timeouts{0};      // requests that did not arrive in time
  std::atomic<uint64_t> malformed{0};     // what was no HTTP, or beyond its limits
  std::atomic<uint64_t> failed_handshakes{0};
  std::atomic<uint64_t> clients_gone{0};  // left before the end of their answer
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
  std::function<Headers(const HttpRequest&)> headers;  // of every answer to it; may be empty
  std::function<void(const AccessRecord&)> done;       // after each answer, on the io thread; may be empty
};

struct TlsContext;
// PEM files: the chain, and its key without password.
Result<std::shared_ptr<TlsContext>> read_tls(const std::string& certificate, const std::string& key);

class HttpServer {
 public:
  // listener: from open_listener() or inherited_listener(); the server owns it. tls null: plain HTTP.
  static std::unique_ptr<HttpServer> start(int listener, HttpLimits limits, HttpHandlers handlers,
                                           std::shared_ptr<TlsContext> tls = nullptr);
  virtual ~HttpServer() = default;
  virtual const HttpCounters& counters() const = 0;
  // For connections from now on.
  virtual void set_tls(std::shared_ptr<TlsContext> tls) = 0;
  // Calls f on the io thread: that it runs shows that the thread is alive.
  virtual void ping(std::function<void()> f) = 0;
  // Stops accepting; connections end after their current answer. Returns at once.
  virtual void stop_accepting() = 0;
  // Waits until the open exchanges have been sent, at most `seconds`; then closes everything and joins the thread.
  virtual void shut_down(double seconds) = 0;
};

}  // namespace mi::server
