#pragma once
// One request and the way to answer it, from any thread. Either respond() once, or begin_stream(), write() ...,
// end_stream(). Nothing here waits for the client: output is queued, and a client that reads too slowly is cut off
// (kMaxQueued).

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
  std::string body;
  std::string id;  // X-Request-Id of the client, or one made here
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

  // Called at most once, when the client went away before the answer ended; at once if it is gone already. Set by the
  // handler.
  void on_gone(std::function<void()> f);
  void client_gone();            // by the connection
  void finish_without_answer();  // by the connection: drops on_gone
  bool keeps_connection() const { return keep_alive_; }

 private:
  std::string head(int status, std::string_view content_type, const Headers& extra, const char* framing) const;
  HttpRequest request_;
  bool http_1_1_;
  std::atomic<bool> keep_alive_;
  std::shared_ptr<Wire> wire_;
  struct Gone;
  std::shared_ptr<Gone> gone_ = make_gone();
  static std::shared_ptr<Gone> make_gone();
};

const char* status_text(int status);

}  // namespace mi::server
