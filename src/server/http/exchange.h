#pragma once
// One request and the way to answer it, from any thread. Either respond() once, or begin_stream(), write() ...,
// end_stream(). Nothing here waits for the client: output is queued, and a client that reads too slowly is cut off
// (HttpLimits::queued_bytes).

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mi::server {

using Headers = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string method;
  std::string path;                        // percent-encoding as sent, without the query
  std::vector<std::string> authorization;  // every Authorization header
  std::vector<std::string> api_key;        // every X-Api-Key header
  std::string host, origin;
  std::string asked_method, asked_headers;  // Access-Control-Request-Method, -Headers
  std::string body;
  std::string id;         // X-Request-Id of the client, or one made here
  std::string peer;       // address of the other side
  std::string agent;      // User-Agent
  std::string trace_id;   // of the client's traceparent header (W3C Trace Context), or empty
  std::string parent_id;  // the caller's span there
  std::string span_id;    // made here, when there is a trace
  bool tls = false;
};

// As in nginx: no answer was sent, because the client had left. No client ever sees it.
inline constexpr int kClientClosed = 499;

// What the access log tells about an answered request.
struct AccessRecord {
  const HttpRequest& request;
  int status = 0;        // what was sent; kClientClosed: the client left before that; 0: the server ended before
  int error_status = 0;  // of a stream that ended with an error: what the answer would have had, had it been known
  size_t bytes_in = 0, bytes_out = 0;
  double seconds = 0;             // from the first byte of the request to the last of the answer
  double first_byte_seconds = 0;  // to the first of the answer
  const char* end = "";           // complete, client_gone, slow_reader, shutdown
  const std::vector<std::pair<std::string, int64_t>>& notes;
};

// What a connection offers to an exchange; called from any thread.
class Wire {
 public:
  virtual ~Wire() = default;
  virtual void send(std::string bytes, bool last) = 0;
};

class Exchange {
 public:
  Exchange(HttpRequest request, bool http_1_1, bool keep_alive, std::shared_ptr<Wire> wire)
      : request_(std::move(request)), http_1_1_(http_1_1), keep_alive_(keep_alive), wire_(std::move(wire)) {}

  const HttpRequest& request() const { return request_; }
  HttpRequest& request() { return request_; }

  void respond(int status, std::string_view content_type, std::string_view body, const Headers& extra = {});
  void begin_stream(std::string_view content_type);
  void write(std::string_view bytes);
  void end_stream();
  // Before end_stream(), of a stream whose last event is an error.
  void set_error_status(int status) { error_status_ = status; }
  // Headers of whatever answer there will be. Before it begins.
  void set_headers(Headers h) { always_ = std::move(h); }
  // A number for the access log, such as the tokens of the answer. Before the end of the answer.
  void note(std::string name, int64_t value);

  // Called at most once, when the client went away before the answer ended; at once if it is gone already. Set by the
  // handler.
  void on_gone(std::function<void()> f);

  // For the connection.
  void client_gone();
  void finish_without_answer();  // drops on_gone
  bool keeps_connection() const { return keep_alive_; }
  bool http_1_1() const { return http_1_1_; }
  bool is_event_stream() const { return events_; }
  std::string comment() const;  // of an event stream, framed
  int status() const { return status_; }
  int error_status() const { return error_status_; }
  std::vector<std::pair<std::string, int64_t>> notes() const;

 private:
  std::string head(int status, std::string_view content_type, const Headers& extra, const char* framing);
  std::string framed(std::string_view bytes) const;
  HttpRequest request_;
  bool http_1_1_;
  std::atomic<bool> keep_alive_;
  std::atomic<bool> events_{false};
  std::atomic<int> status_{0}, error_status_{0};
  Headers always_;
  std::shared_ptr<Wire> wire_;
  struct Shared;
  std::shared_ptr<Shared> shared_ = make_shared_part();
  static std::shared_ptr<Shared> make_shared_part();
};

const char* status_text(int status);

}  // namespace mi::server
