#include "server/http/http_server.h"

// clang-format off
#include <utility>  // Boost.Asio 1.74 uses std::exchange without including it
// clang-format on

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <future>
#include <thread>
#include <vector>

#include "server/http/connection.h"

namespace mi::server {
namespace {

using boost::system::error_code;
using tcp = asio::ip::tcp;

class Server : public HttpServer {
 public:
  Server(HttpLimits limits, HttpHandlers handlers) : limits_(limits), handlers_(std::move(handlers)), acceptor_(io_) {}
  ~Server() override { shut_down(0); }

  Status bind(const std::string& host, int port) {
    error_code ec;
    const asio::ip::address address = asio::ip::make_address(host == "localhost" ? "127.0.0.1" : host, ec);
    if (ec)
      return fail(ErrorCode::kUsage, "--host {}: not an IP address (127.0.0.1 for this machine only, 0.0.0.0 for all)",
                  host);
    const tcp::endpoint endpoint(address, static_cast<unsigned short>(port));
    acceptor_.open(endpoint.protocol(), ec);
    if (!ec) acceptor_.set_option(tcp::acceptor::reuse_address(true), ec);
    if (!ec) acceptor_.bind(endpoint, ec);
    if (!ec) acceptor_.listen(1024, ec);
    if (ec == asio::error::address_in_use)
      return fail(ErrorCode::kEnvironment,
                  "{}:{} is in use by another program; give another --port (0 picks a free one)", host, port);
    if (ec) return fail(ErrorCode::kEnvironment, "cannot listen on {}:{}: {}", host, port, ec.message());
    port_ = acceptor_.local_endpoint().port();
    return {};
  }

  void start() {
    asio::co_spawn(io_, accept_loop(), asio::detached);
    thread_ = std::thread([this] { io_.run(); });
  }

  int port() const override { return port_; }

  void stop_accepting() override {
    asio::post(io_, [this] {
      error_code ec;
      acceptor_.close(ec);
      for (const auto& weak : connections_)
        if (const auto c = weak.lock()) c->close_when_idle();
    });
  }

  void shut_down(double seconds) override {
    if (!thread_.joinable()) return;
    stop_accepting();
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (std::chrono::steady_clock::now() < until && count_open() > 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    asio::post(io_, [this] {
      for (const auto& weak : connections_)
        if (const auto c = weak.lock()) c->close_now();
    });
    // Closed connections end by themselves within a few turns of the loop; io_.stop() then only cuts what hangs.
    for (int i = 0; i < 100 && count_open() > 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    work_.reset();
    io_.stop();
    thread_.join();
  }

 private:
  size_t count_open() {
    std::promise<size_t> n;
    auto future = n.get_future();
    asio::post(io_, [&] {
      prune();
      n.set_value(connections_.size());
    });
    return future.get();
  }

  void prune() {
    connections_.erase(
        std::remove_if(connections_.begin(), connections_.end(), [](const auto& w) { return w.expired(); }),
        connections_.end());
  }

  asio::awaitable<void> accept_loop() {
    while (acceptor_.is_open()) {
      error_code ec;
      tcp::socket socket = co_await acceptor_.async_accept(asio::redirect_error(asio::use_awaitable, ec));
      if (ec == asio::error::operation_aborted || ec == asio::error::bad_descriptor) co_return;
      if (ec) {
        // Out of descriptors, most likely: wait a little instead of spinning.
        asio::steady_timer pause(io_, std::chrono::milliseconds(50));
        error_code ignored;
        co_await pause.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
        continue;
      }
      prune();
      if (int(connections_.size()) >= limits_.max_connections) {
        socket.close(ec);
        continue;
      }
      auto c = std::make_shared<Connection>(std::move(socket), limits_, handlers_);
      connections_.push_back(c);
      asio::co_spawn(
          io_, [c]() { return c->run(); }, asio::detached);
    }
  }

  HttpLimits limits_;
  HttpHandlers handlers_;
  asio::io_context io_{1};
  std::optional<asio::executor_work_guard<asio::io_context::executor_type>> work_{
      io_.get_executor()};  // the loop outlives its last socket
  tcp::acceptor acceptor_;
  std::vector<std::weak_ptr<Connection>> connections_;  // on the io thread
  std::thread thread_;
  int port_ = 0;
};

}  // namespace

Result<std::unique_ptr<HttpServer>> HttpServer::listen(const std::string& host, int port, HttpLimits limits,
                                                       HttpHandlers handlers) {
  auto s = std::make_unique<Server>(limits, std::move(handlers));
  MI_TRY_VOID(s->bind(host, port));
  s->start();
  return std::unique_ptr<HttpServer>(std::move(s));
}

}  // namespace mi::server
