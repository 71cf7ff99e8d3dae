#pragma once
// One client connection of the HTTP server. Internal to server/http. Everything here runs on the io thread.

// clang-format off
#include <utility>  // Boost.Asio 1.74 uses std::exchange without including it
// clang-format on

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "server/http/http_server.h"
#include "server/http/tls.h"

namespace mi::server {

namespace asio = boost::asio;
namespace beast = boost::beast;

// What the connections of a server share.
struct ConnectionSurroundings {
  const HttpLimits& limits;
  const HttpHandlers& handlers;
  HttpCounters& counters;
  size_t body_bytes = 0;  // held by all connections, against HttpLimits::all_body_bytes
  int places = 0;         // held by requests, against HttpLimits::max_connections
  // Frees a place that is held by a body that does not arrive, if there is one.
  std::function<void()> make_place;
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  using Clock = std::chrono::steady_clock;
  Connection(asio::ip::tcp::socket socket, ConnectionSurroundings& around, std::shared_ptr<TlsContext> tls);
  ~Connection();
  asio::awaitable<void> run();  // until the connection ends
  void queue(uint64_t serial, std::string bytes, bool last);
  void close_when_idle();  // after the current answer
  void close_now();
  bool busy() const { return exchange_ != nullptr; }
  bool between_requests() const { return between_; }
  bool kept() const { return between_ && requests_ > 0; }  // idle after an answer
  bool holds_place() const { return placed_; }
  Clock::time_point since() const { return since_; }  // when the wait for a request, or the request, began

 private:
  using TlsStream = asio::ssl::stream<beast::tcp_stream&>;
  // f(stream) with the stream that HTTP goes over.
  template <typename F>
  auto over(F f) {
    return tls_ ? f(*tls_) : f(stream_);
  }
  asio::awaitable<bool> handshake();
  // false: the connection ends.
  asio::awaitable<bool> serve_one();
  asio::awaitable<bool> refuse(int status, const std::string& message, const Headers& headers = {});
  asio::awaitable<bool> refuse_unread(HttpRequest request, int status, std::string body, const Headers& headers);
  asio::awaitable<bool> send_answer();
  asio::awaitable<bool> send_queued();  // false: the client does not take it
  asio::awaitable<void> close();
  asio::awaitable<void> watch_client(std::shared_ptr<Exchange> exchange);
  void probe_client();
  void begin_exchange(HttpRequest request, bool http_1_1, bool keep_alive);
  void take_place();
  void leave_place();
  void push(std::string bytes);
  void taken(size_t bytes);
  bool client_is_behind();
  void log_exchange(const Exchange& exchange, const char* end);

  // Cancels what the stream waits for after this time, and sets late_. Beast's own limits would close the socket, and
  // the client would not learn why.
  void limit(std::chrono::seconds time);
  void no_limit();
  void hold_body(size_t bytes);  // in all, for this request
  HttpRequest from_header(const void* header) const;

  beast::tcp_stream stream_;
  ConnectionSurroundings& around_;
  const HttpLimits& limits_;
  std::shared_ptr<TlsContext> tls_context_;
  std::optional<TlsStream> tls_;
  beast::flat_buffer buffer_;
  asio::steady_timer limit_, output_, watch_;  // output_: cancelled when something was queued
  uint64_t limit_serial_ = 0;
  bool late_ = false;
  std::deque<std::string> queue_;
  std::deque<size_t> untaken_;  // what is left of each piece of output, those of the write under way included
  size_t queued_bytes_ = 0;     // their sum
  size_t sent_bytes_ = 0, received_bytes_ = 0, held_body_ = 0;
  bool answer_begun_ = false, answer_sent_ = false, answer_complete_ = false, overrun_ = false;
  bool closing_ = false;                // no further request
  bool gone_ = false;                   // the client left or was cut off
  bool between_ = true;                 // no byte of a request has come
  bool placed_ = false;                 // counted in ConnectionSurroundings::places
  uint64_t requests_ = 0;               // whose head has come
  std::shared_ptr<Exchange> exchange_;  // the request being answered
  uint64_t serial_ = 0;                 // of the current exchange; late output of an older one is dropped
  Clock::time_point since_, first_byte_;
  std::string peer_;
};

}  // namespace mi::server
