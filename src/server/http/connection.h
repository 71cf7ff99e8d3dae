#pragma once
// One client connection of the HTTP server. Internal to server/http.

// clang-format off
#include <utility>  // Boost.Asio 1.74 uses std::exchange without including it
// clang-format on

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <deque>
#include <memory>
#include <string>

#include "server/http/http_server.h"

namespace mi::server {

namespace asio = boost::asio;
namespace beast = boost::beast;

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(asio::ip::tcp::socket socket, const HttpLimits& limits, const HttpHandlers& handlers);
  ~Connection();
  asio::awaitable<void> run();                                // until the connection ends
  void queue(uint64_t serial, std::string bytes, bool last);  // on the io thread
  void close_when_idle();                                     // on the io thread: after the current answer
  void close_now();                                           // on the io thread
  bool busy() const { return exchange_ != nullptr; }

 private:
  // false: the connection ends.
  asio::awaitable<bool> serve_one();
  asio::awaitable<bool> refuse(int status, std::string body, const Headers& headers, bool unread_body);
  asio::awaitable<bool> send_answer();
  asio::awaitable<void> watch_client(std::shared_ptr<Exchange> exchange);
  void begin_exchange(HttpRequest request, bool http_1_1, bool keep_alive);

  beast::tcp_stream stream_;
  beast::flat_buffer buffer_;
  const HttpLimits& limits_;
  const HttpHandlers& handlers_;
  asio::steady_timer output_;  // cancelled when something was queued
  std::deque<std::string> queue_;
  size_t queued_bytes_ = 0;
  bool answer_complete_ = false, overrun_ = false;
  bool closing_ = false;                // no further request
  bool gone_ = false;                   // the client left or was cut off
  std::shared_ptr<Exchange> exchange_;  // the request being answered
  uint64_t serial_ = 0;                 // of the current exchange; late output of an older one is dropped
};

}  // namespace mi::server
