#include "server/http/connection.h"

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http.hpp>
#include <random>

#include "base/check.h"

namespace mi::server {
namespace {

namespace http = beast::http;
using boost::system::error_code;
using std::chrono::seconds;

constexpr size_t kLinger =
    size_t(4) << 20;  // bytes of a refused body that are read and thrown away, so that the answer arrives

// Beside a whole header. What has to be parsed in one piece (the line of a chunk, the trailer) is bounded by the
// buffer: the limits of the parser count only headers and bodies.
constexpr size_t kReadAhead = size_t(64) << 10;

auto into(error_code& ec) { return asio::redirect_error(asio::use_awaitable, ec); }

std::string new_request_id() {
  static thread_local std::mt19937_64 rng{std::random_device{}()};
  return fmt::format("req-{:016x}", rng());
}

// An id from outside goes into logs and headers: only harmless characters, bounded.
bool usable_id(std::string_view s) {
  if (s.empty() || s.size() > 128) return false;
  for (char c : s)
    if (!(isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.')) return false;
  return true;
}

HttpRequest from_header(const http::request_header<>& h) {
  HttpRequest r;
  r.method = std::string(h.method_string());
  r.path = std::string(h.target());
  r.path = r.path.substr(0, r.path.find('?'));
  for (const auto& field : h)
    if (field.name() == http::field::authorization) r.authorization.emplace_back(field.value());
  const auto id = h["X-Request-Id"];
  r.id = usable_id({id.data(), id.size()}) ? std::string(id) : new_request_id();
  return r;
}

// The wire of one exchange: output that comes after its connection went on to the next request is dropped.
class ExchangeWire : public Wire {
 public:
  ExchangeWire(std::weak_ptr<Connection> c, asio::any_io_executor executor, uint64_t serial)
      : connection_(std::move(c)), executor_(std::move(executor)), serial_(serial) {}
  void send(std::string bytes, bool last) override {
    asio::post(executor_, [c = connection_, serial = serial_, bytes = std::move(bytes), last]() mutable {
      if (const auto connection = c.lock()) connection->queue(serial, std::move(bytes), last);
    });
  }

 private:
  std::weak_ptr<Connection> connection_;
  asio::any_io_executor executor_;
  uint64_t serial_;
};

}  // namespace

Connection::Connection(asio::ip::tcp::socket socket, const HttpLimits& limits, const HttpHandlers& handlers)
    : stream_(std::move(socket)),
      buffer_(limits.header_bytes + kReadAhead),
      limits_(limits),
      handlers_(handlers),
      output_(stream_.get_executor()) {}
Connection::~Connection() = default;

void Connection::close_when_idle() {
  closing_ = true;
  if (!busy()) close_now();
}

void Connection::close_now() {
  error_code ec;
  gone_ = gone_ || busy();
  stream_.socket().shutdown(asio::ip::tcp::socket::shutdown_both, ec);
  stream_.close();
  output_.cancel();
}

asio::awaitable<void> Connection::run() {
  const auto self = shared_from_this();
  error_code ec;
  stream_.socket().set_option(asio::ip::tcp::no_delay(true), ec);
  while (co_await serve_one()) {
  }
  stream_.socket().shutdown(asio::ip::tcp::socket::shutdown_both, ec);
  stream_.close();
}

asio::awaitable<bool> Connection::refuse(int status, std::string body, const Headers& headers, bool unread_body) {
  HttpRequest r;
  r.id = new_request_id();
  const bool keep = !unread_body;
  begin_exchange(std::move(r), true, keep);
  exchange_->respond(status, "application/json", body, headers);
  const bool sent = co_await send_answer();
  if (!unread_body || !sent) co_return sent&& keep;
  // Closing with unread bytes resets the connection, and the client may lose the answer: finish our side, read on a
  // little.
  error_code ec;
  stream_.socket().shutdown(asio::ip::tcp::socket::shutdown_send, ec);
  stream_.expires_after(seconds(2));
  std::string dump(64 << 10, '\0');
  for (size_t total = 0; total < kLinger;) {
    const size_t n = co_await stream_.async_read_some(asio::buffer(dump), into(ec));
    if (ec) break;
    total += n;
  }
  co_return false;
}

asio::awaitable<bool> Connection::serve_one() {
  error_code ec;
  http::request_parser<http::string_body> parser;
  parser.header_limit(uint32_t(limits_.header_bytes));
  parser.body_limit(UINT64_MAX);  // checked here, with an answer (Beast 1.74 takes "none" for zero)
  if (closing_) co_return false;
  // Between requests a connection may be idle; once a byte is here, the request must come in time.
  if (buffer_.size() == 0) {
    stream_.expires_after(seconds(limits_.idle_seconds));
    const size_t n = co_await stream_.async_read_some(buffer_.prepare(16 << 10), into(ec));
    if (ec) co_return false;
    buffer_.commit(n);
  }
  if (closing_) co_return false;
  stream_.expires_after(seconds(limits_.read_seconds));
  co_await http::async_read_header(stream_, buffer_, parser, into(ec));
  if (ec == http::error::end_of_stream || ec == asio::error::connection_reset || ec == asio::error::operation_aborted ||
      ec == http::error::partial_message)
    co_return false;
  if (ec == beast::error::timeout) co_return false;  // the stream has closed itself
  if (ec == http::error::header_limit || ec == http::error::buffer_overflow)
    co_return co_await refuse(
        431,
        handlers_.error_body(431, fmt::format("the request's headers are larger than {} bytes", limits_.header_bytes)),
        {}, true);
  if (ec) co_return co_await refuse(400, handlers_.error_body(400, "the request is not valid HTTP"), {}, true);

  const bool http_1_1 = parser.get().version() >= 11;
  const bool keep = parser.keep_alive() && !closing_;
  HttpRequest request = from_header(parser.get());
  const auto length = parser.content_length();
  const bool has_body = parser.chunked() || (length && *length > 0);

  EarlyAnswer early = handlers_.early(request);
  if (early.status == 0 && length && *length > limits_.body_bytes) {
    early.status = 413;
    early.body = handlers_.error_body(
        413, fmt::format("the body has {} bytes, more than the limit of {}", *length, limits_.body_bytes));
  }
  if (early.status == 0 && has_body) {
    if (beast::iequals(parser.get()[http::field::expect], "100-continue")) {
      static const std::string go_on = "HTTP/1.1 100 Continue\r\n\r\n";
      co_await asio::async_write(stream_, asio::buffer(go_on), into(ec));
      if (ec) co_return false;
    }
    // Piece by piece, so that a chunked body is bounded too.
    parser.body_limit(limits_.body_bytes);
    co_await http::async_read(stream_, buffer_, parser, into(ec));
    if (ec == http::error::body_limit) {
      early.status = 413;
      early.body =
          handlers_.error_body(413, fmt::format("the body is larger than the limit of {} bytes", limits_.body_bytes));
    } else if (ec == beast::error::timeout || ec == http::error::end_of_stream || ec == http::error::partial_message ||
               ec == asio::error::connection_reset || ec == asio::error::eof) {
      co_return false;
    } else if (ec == http::error::buffer_overflow) {
      co_return co_await refuse(
          400, handlers_.error_body(400, "the line of a chunk, or what follows the last chunk, is too long"), {}, true);
    } else if (ec) {
      co_return co_await refuse(400, handlers_.error_body(400, "the request's body is not valid HTTP"), {}, true);
    }
  }
  if (early.status != 0 && has_body)
    co_return co_await refuse(early.status, std::move(early.body), early.headers, true);

  request.body = std::move(parser.get().body());
  begin_exchange(std::move(request), http_1_1, keep);
  if (early.status != 0) {
    exchange_->respond(early.status, "application/json", early.body, early.headers);
  } else {
    asio::co_spawn(
        stream_.get_executor(), [self = shared_from_this(), e = exchange_]() { return self->watch_client(e); },
        asio::detached);
    handlers_.handle(exchange_);
  }
  co_return co_await send_answer();
}

void Connection::begin_exchange(HttpRequest request, bool http_1_1, bool keep_alive) {
  answer_complete_ = false;
  auto wire = std::make_shared<ExchangeWire>(weak_from_this(), stream_.get_executor(), ++serial_);
  exchange_ = std::make_shared<Exchange>(std::move(request), http_1_1, keep_alive, std::move(wire));
  stream_.expires_never();
}

// Notices a client that leaves while its answer is being made. Bytes that arrive are a pipelined request: then the
// watch ends, and a later disconnect shows when the answer is written.
asio::awaitable<void> Connection::watch_client(std::shared_ptr<Exchange> exchange) {
  error_code ec;
  co_await stream_.socket().async_wait(asio::ip::tcp::socket::wait_read, into(ec));
  if (ec || exchange_ != exchange) co_return;
  char byte = 0;
  const ssize_t n = ::recv(stream_.socket().native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  if (n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
    gone_ = true;
    exchange->client_gone();
    queue(serial_, {}, true);
  }
}

void Connection::queue(uint64_t serial, std::string bytes, bool last) {
  if (serial != serial_ || answer_complete_) return;
  queued_bytes_ += bytes.size();
  if (queued_bytes_ > limits_.queued_bytes && !last) overrun_ = true;
  if (!bytes.empty()) queue_.push_back(std::move(bytes));
  answer_complete_ = last;
  output_.cancel();
}

asio::awaitable<bool> Connection::send_answer() {
  error_code ec;
  bool ok = true;
  while (true) {
    if (queue_.empty()) {
      if (answer_complete_ || gone_) break;
      output_.expires_at(asio::steady_timer::time_point::max());
      co_await output_.async_wait(into(ec));
      continue;
    }
    if (overrun_ || gone_) {
      ok = false;
      break;
    }
    std::string bytes;
    while (!queue_.empty()) {  // what has gathered goes out in one write
      bytes += queue_.front();
      queue_.pop_front();
    }
    stream_.expires_after(seconds(limits_.write_seconds));
    co_await asio::async_write(stream_, asio::buffer(bytes), into(ec));
    stream_.expires_never();
    queued_bytes_ -= std::min(queued_bytes_, bytes.size());
    if (ec) {
      ok = false;
      break;
    }
  }
  const auto exchange = std::move(exchange_);
  exchange_.reset();
  queue_.clear();
  queued_bytes_ = 0;
  overrun_ = false;
  if (!ok || gone_) {
    gone_ = true;
    exchange->client_gone();
  } else {
    exchange->finish_without_answer();
  }
  // Ends the watch of this exchange.
  stream_.socket().cancel(ec);
  co_return !gone_ && !closing_ && exchange->keeps_connection();
}

}  // namespace mi::server
