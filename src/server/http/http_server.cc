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
#include <exception>
#include <future>
#include <thread>
#include <vector>

#include "server/http/connection.h"
#include "server/http/listener.h"

namespace mi::server {
namespace {

using boost::system::error_code;
using tcp = asio::ip::tcp;

class Server : public HttpServer {
 public:
  Server(int listener, HttpLimits limits, HttpHandlers handlers, std::shared_ptr<TlsContext> tls)
      : limits_(limits), handlers_(std::move(handlers)), tls_(std::move(tls)), acceptor_(io_) {
    around_.make_place = [this] { make_place(); };
    acceptor_.assign(bound_address(listener).host.find(':') == std::string::npos ? tcp::v4() : tcp::v6(), listener);
  }
  ~Server() override { shut_down(0); }

  void begin() {
    // A connection may end by an exception (out of memory). Were this loop to end so, nobody would be let in any more.
    asio::co_spawn(io_, accept_loop(), [](const std::exception_ptr& e) {
      if (e) std::rethrow_exception(e);
    });
    thread_ = std::thread([this] { io_.run(); });
  }

  const HttpCounters& counters() const override { return counters_; }
  void set_tls(std::shared_ptr<TlsContext> tls) override {
    asio::post(io_, [this, tls = std::move(tls)]() mutable { tls_ = std::move(tls); });
  }
  void ping(std::function<void()> f) override { asio::post(io_, std::move(f)); }

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

  // The connection that has been waiting for a request the longest, else the request that has been arriving the
  // longest; null when every connection is being answered.
  std::shared_ptr<Connection> find_least_needed() const {
    std::shared_ptr<Connection> best;
    for (const auto& weak : connections_) {
      auto c = weak.lock();
      if (!c || c->busy()) continue;
      if (!best || std::pair(!c->between_requests(), c->since()) < std::pair(!best->between_requests(), best->since()))
        best = std::move(c);
    }
    return best;
  }

  // A kept connection may be closed whenever it is idle; its client knows that. Null if there is none.
  std::shared_ptr<Connection> find_kept() const {
    std::shared_ptr<Connection> best;
    for (const auto& weak : connections_)
      if (auto c = weak.lock(); c && c->kept() && (!best || c->since() < best->since())) best = std::move(c);
    return best;
  }

  // Whoever sends a head and lets its body wait holds the place of one who would send it all.
  void make_place() {
    const auto late = Connection::Clock::now() - std::chrono::seconds(limits_.arriving_seconds);
    std::shared_ptr<Connection> slowest;
    for (const auto& weak : connections_) {
      auto c = weak.lock();
      if (c && c->holds_place() && !c->busy() && c->since() < late && (!slowest || c->since() < slowest->since()))
        slowest = std::move(c);
    }
    if (slowest) evict(slowest);
  }

  // A closed connection leaves the list a few turns of the loop later, so it is taken out here.
  void evict(const std::shared_ptr<Connection>& c) {
    c->close_now();
    ++counters_.evicted;
    std::erase_if(connections_, [&](const auto& w) { return w.lock() == c; });
  }

  asio::awaitable<void> accept_loop() {
    while (acceptor_.is_open()) {
      error_code ec;
      tcp::socket socket = co_await acceptor_.async_accept(asio::redirect_error(asio::use_awaitable, ec));
      if (ec == asio::error::operation_aborted || ec == asio::error::bad_descriptor) co_return;
      if (ec) {
        // Out of descriptors, most likely: take one from who does not need it, and wait a little instead of spinning.
        if (const auto c = find_least_needed()) evict(c);
        asio::steady_timer pause(io_, std::chrono::milliseconds(50));
        error_code ignored;
        co_await pause.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
        continue;
      }
      ++counters_.accepted;
      prune();
      if (int(connections_.size()) >= limits_.max_connections)
        if (const auto c = find_kept()) evict(c);
      // Who has not been heard yet is left alone as long as there is room, so that a burst of clients gets answers, be
      // they 503. Beyond that it is a flood, and the longest silent one goes.
      const int most = limits_.max_connections + limits_.spare_connections + limits_.heard_connections;
      if (int(connections_.size()) >= most)
        if (const auto c = find_least_needed()) evict(c);
      if (int(connections_.size()) >= most) {
        ++counters_.turned_away;
        socket.close(ec);
        continue;
      }
      auto c = std::make_shared<Connection>(std::move(socket), around_, tls_);
      connections_.push_back(c);
      asio::co_spawn(
          io_, [c]() { return c->run(); }, asio::detached);
    }
  }

  HttpLimits limits_;
  HttpHandlers handlers_;
  HttpCounters counters_;
  ConnectionSurroundings around_{limits_, handlers_, counters_};
  std::shared_ptr<TlsContext> tls_;  // of the next connections; on the io thread
  asio::io_context io_{1};
  std::optional<asio::executor_work_guard<asio::io_context::executor_type>> work_{
      io_.get_executor()};  // the loop outlives its last socket
  tcp::acceptor acceptor_;
  std::vector<std::weak_ptr<Connection>> connections_;  // on the io thread
  std::thread thread_;
};

}  // namespace

std::unique_ptr<HttpServer> HttpServer::start(int listener, HttpLimits limits, HttpHandlers handlers,
                                              std::shared_ptr<TlsContext> tls) {
  auto s = std::make_unique<Server>(listener, limits, std::move(handlers), std::move(tls));
  s->begin();
  return s;
}

}  // namespace mi::server
