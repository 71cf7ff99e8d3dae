#include "server/http/connection.h"

#include <netinet/tcp.h>
#include <poll.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http.hpp>

#include "base/check.h"
#include "server/head/head_reader.h"
#include "server/http/trace.h"

namespace mi::server {
namespace {

namespace http = beast::http;
using boost::system::error_code;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr size_t kLinger =
    size_t(4) << 20;  // bytes of a refused body that are read and thrown away, so that the answer arrives

// Beside a whole header. What has to be parsed in one piece (the line of a chunk, the trailer) is bounded by the
// buffer: the limits of the parser count only headers and bodies.
constexpr size_t kReadAhead = size_t(64) << 10;
constexpr size_t kRead = size_t(16) << 10;  // at a time

constexpr auto kWatchInterval = milliseconds(100);
constexpr auto kFarewell = seconds(2);  // for the last bytes of a connection

auto into(error_code& ec) { return asio::redirect_error(asio::use_awaitable, ec); }

std::string text(beast::string_view s) { return {s.data(), s.size()}; }

double seconds_between(Connection::Clock::time_point a, Connection::Clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
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

Connection::Connection(asio::ip::tcp::socket socket, ConnectionSurroundings& around, std::shared_ptr<TlsContext> tls)
    : stream_(std::move(socket)),
      around_(around),
      limits_(around.limits),
      tls_context_(std::move(tls)),
      buffer_(limits_.header_bytes + kReadAhead),
      limit_(stream_.get_executor()),
      output_(stream_.get_executor()),
      watch_(stream_.get_executor()),
      since_(Clock::now()) {
  ++around_.counters.open;
}
Connection::~Connection() {
  hold_body(0);
  leave_place();
  --around_.counters.open;
}

void Connection::limit(seconds time) {
  late_ = false;
  limit_.expires_after(time);
  limit_.async_wait([weak = weak_from_this(), serial = ++limit_serial_](error_code ec) {
    const auto self = weak.lock();
    // A wait that ended while it was being replaced comes here without an error: the number tells.
    if (ec || !self || self->limit_serial_ != serial) return;
    self->late_ = true;
    self->stream_.cancel();
  });
}
void Connection::no_limit() {
  ++limit_serial_;
  limit_.cancel();
}

void Connection::hold_body(size_t bytes) {
  around_.body_bytes += bytes - held_body_;
  held_body_ = bytes;
}

void Connection::take_place() {
  leave_place();
  if (around_.places >= limits_.max_connections) around_.make_place();
  placed_ = true;
  ++around_.places;
}
void Connection::leave_place() {
  if (std::exchange(placed_, false)) --around_.places;
}

void Connection::close_when_idle() {
  closing_ = true;
  if (!busy()) close_now();
}

void Connection::close_now() {
  error_code ec;
  closing_ = true;
  gone_ = gone_ || busy();
  leave_place();
  stream_.socket().shutdown(asio::ip::tcp::socket::shutdown_both, ec);
  stream_.close();
  no_limit();
  output_.cancel();
  watch_.cancel();
}

asio::awaitable<void> Connection::run() {
  const auto self = shared_from_this();
  error_code ec;
  const auto remote = stream_.socket().remote_endpoint(ec);
  if (!ec) peer_ = remote.address().to_string(ec);
  stream_.socket().set_option(asio::ip::tcp::no_delay(true), ec);
  // A host that vanished without a word: what is sent to it ends here, not after the kernel's quarter of an hour.
  const unsigned int patience = unsigned(limits_.write_seconds) * 1000;
  ::setsockopt(stream_.socket().native_handle(), IPPROTO_TCP, TCP_USER_TIMEOUT, &patience, sizeof(patience));
  stream_.socket().set_option(asio::socket_base::keep_alive(true), ec);
  bool going = !tls_context_ || co_await handshake();
  while (going) {
    going = co_await serve_one();
    leave_place();
  }
  co_await close();
}

asio::awaitable<bool> Connection::handshake() {
  error_code ec;
  tls_.emplace(stream_, tls_context_->context);
  limit(seconds(limits_.handshake_seconds));
  co_await tls_->async_handshake(asio::ssl::stream_base::server, into(ec));
  no_limit();
  if (!ec) co_return true;
  ++around_.counters.failed_handshakes;
  tls_.reset();
  co_return false;
}

asio::awaitable<void> Connection::close() {
  error_code ec;
  if (overrun_) {
    // What the kernel still holds for a client that does not read is dropped with the connection.
    stream_.socket().set_option(asio::socket_base::linger(true, 0), ec);
  } else if (tls_ && !gone_) {
    // Tells the client that nothing was cut off. Its own farewell is waited for only briefly.
    limit(kFarewell);
    co_await tls_->async_shutdown(into(ec));
    no_limit();
  }
  if (!overrun_) stream_.socket().shutdown(asio::ip::tcp::socket::shutdown_both, ec);
  stream_.close();
}

// An error that HTTP itself finds; nothing of the request can be believed.
asio::awaitable<bool> Connection::refuse(int status, const std::string& message, const Headers& headers) {
  ++(status == 408 ? around_.counters.timeouts : around_.counters.malformed);
  HttpRequest r;
  r.id = new_request_id();
  r.peer = peer_;
  r.tls = bool(tls_);
  co_return co_await refuse_unread(std::move(r), status, around_.handlers.error_body(status, message), headers);
}

asio::awaitable<bool> Connection::refuse_unread(HttpRequest request, int status, std::string body,
                                                const Headers& headers) {
  begin_exchange(std::move(request), true, false);
  exchange_->respond(status, "application/json", body, headers);
  if (!co_await send_answer() && gone_) co_return false;
  // Closing with unread bytes resets the connection, and the client may lose the answer: finish our side, read on a
  // little.
  error_code ec;
  limit(kFarewell);
  if (tls_) {
    co_await tls_->async_shutdown(into(ec));
    tls_.reset();
    if (late_) co_return false;
  }
  stream_.socket().shutdown(asio::ip::tcp::socket::shutdown_send, ec);
  std::string dump(64 << 10, '\0');
  for (size_t total = 0; total < kLinger;) {
    const size_t n = co_await stream_.async_read_some(asio::buffer(dump), into(ec));
    if (ec) break;
    total += n;
  }
  no_limit();
  co_return false;
}

HttpRequest Connection::from_header(const void* header) const {
  const auto& h = *static_cast<const http::request_header<>*>(header);
  HttpRequest r;
  r.method = text(h.method_string());
  r.path = text(h.target());
  r.path = r.path.substr(0, r.path.find('?'));
  for (const auto& field : h) {
    if (field.name() == http::field::authorization)
      r.authorization.push_back(text(field.value()));
    else if (beast::iequals(field.name_string(), "x-api-key"))
      r.api_key.push_back(text(field.value()));
  }
  r.host = text(h[http::field::host]);
  r.origin = text(h[http::field::origin]);
  r.asked_method = text(h[http::field::access_control_request_method]);
  r.asked_headers = text(h[http::field::access_control_request_headers]);
  r.agent = text(h[http::field::user_agent]);
  r.id = request_id_of(text(h["X-Request-Id"]));
  if (const auto t = parse_traceparent(text(h["traceparent"]))) {
    r.trace_id = t->trace_id;
    r.parent_id = t->span_id;
    r.span_id = new_span_id();
  }
  r.peer = peer_;
  r.tls = bool(tls_);
  return r;
}

asio::awaitable<bool> Connection::serve_one() {
  error_code ec;
  HeadReader head({limits_.header_bytes, limits_.header_fields});
  if (closing_) co_return false;
  hold_body(0);
  between_ = true;
  since_ = Clock::now();
  // Between requests a connection may be idle; once a byte is here, the request must come in time.
  if (buffer_.size() == 0) {
    limit(seconds(limits_.idle_seconds));
    const size_t n = co_await over([&](auto& s) { return s.async_read_some(buffer_.prepare(kRead), into(ec)); });
    no_limit();
    if (ec) co_return false;
    buffer_.commit(n);
    since_ = Clock::now();
  }
  between_ = false;
  if (closing_) co_return false;
  limit(seconds(limits_.read_seconds));
  const std::string too_late = fmt::format("the request did not arrive whole within {} s", limits_.read_seconds);
  for (received_bytes_ = 0; !head.done() && !head.refusal();) {
    const size_t used = head.push({static_cast<const char*>(buffer_.data().data()), buffer_.size()});
    buffer_.consume(used);
    received_bytes_ += used;
    if (head.done() || head.refusal()) break;
    const size_t n = co_await over(
        [&](auto& s) { return s.async_read_some(buffer_.prepare(beast::read_size(buffer_, kRead)), into(ec)); });
    if (late_) co_return co_await refuse(408, too_late);
    if (ec) co_return false;  // the client left
    buffer_.commit(n);
  }
  if (head.refusal()) co_return co_await refuse(head.refusal()->status, head.refusal()->message);
  HeadReader::Parser& parser = head.parser();
  const auto& header = parser.get();

  ++requests_;
  take_place();
  const int beyond = around_.places - limits_.max_connections;
  const bool http_1_1 = header.version() >= 11;
  const bool keep = parser.keep_alive() && !closing_ && beyond <= 0;
  HttpRequest request = from_header(&header);
  const auto length = parser.content_length();
  const bool has_body = parser.chunked() || (length && *length > 0);

  EarlyAnswer early = around_.handlers.early(request);
  const auto say = [&](int status, const std::string& message, Headers headers = {}) {
    early.status = status;
    early.body = around_.handlers.error_body(status, message);
    early.headers = std::move(headers);
  };
  const bool small = request.method == "GET" || request.method == "HEAD";
  if (early.status == 0 && beyond > (small ? limits_.spare_connections : 0)) {
    say(503, fmt::format("all {} connections are in use", limits_.max_connections), {{"Retry-After", "1"}});
    ++around_.counters.crowded;
    leave_place();  // how long it takes to hear the answer is nobody else's affair
  }
  if (early.status == 0 && length && *length > limits_.body_bytes)
    say(413, fmt::format("the body has {} bytes, more than the limit of {}", *length, limits_.body_bytes));
  if (early.status == 0 && has_body) {
    if (beast::iequals(header[http::field::expect], "100-continue")) {
      static const std::string go_on = "HTTP/1.1 100 Continue\r\n\r\n";
      co_await over([&](auto& s) { return asio::async_write(s, asio::buffer(go_on), into(ec)); });
      if (late_) co_return co_await refuse(408, too_late);
      if (ec) co_return false;
    }
    // Piece by piece, so that a chunked body is bounded too, and all bodies together.
    parser.body_limit(limits_.body_bytes);
    while (!parser.is_done() && early.status == 0) {
      received_bytes_ += co_await over([&](auto& s) { return http::async_read_some(s, buffer_, parser, into(ec)); });
      hold_body(parser.get().body().size());
      if (late_) {
        say(408, too_late);
        ++around_.counters.timeouts;
      } else if (ec == http::error::body_limit) {
        say(413, fmt::format("the body is larger than the limit of {} bytes", limits_.body_bytes));
      } else if (ec == http::error::buffer_overflow) {
        say(400, "the line of a chunk, or what follows the last chunk, is too long");
        ++around_.counters.malformed;
      } else if (ec == http::error::end_of_stream || ec == http::error::partial_message) {
        co_return false;
      } else if (ec && ec.category() == make_error_code(http::error::bad_method).category()) {
        say(400, "the request's body is not valid HTTP");
        ++around_.counters.malformed;
      } else if (ec) {
        co_return false;
      } else if (around_.body_bytes > limits_.all_body_bytes) {
        say(503, "the server holds as many request bodies as it may; send fewer large ones at a time",
            {{"Retry-After", "1"}});
      }
    }
  }
  no_limit();
  if (early.status != 0 && has_body) {
    std::string().swap(parser.get().body());
    hold_body(0);
    co_return co_await refuse_unread(std::move(request), early.status, std::move(early.body), early.headers);
  }

  request.body = std::move(parser.get().body());
  begin_exchange(std::move(request), http_1_1, keep);
  if (early.status != 0) {
    exchange_->respond(early.status, "application/json", early.body, early.headers);
  } else {
    asio::co_spawn(
        stream_.get_executor(), [self = shared_from_this(), e = exchange_]() { return self->watch_client(e); },
        asio::detached);
    around_.handlers.handle(exchange_);
  }
  co_return co_await send_answer();
}

void Connection::begin_exchange(HttpRequest request, bool http_1_1, bool keep_alive) {
  no_limit();
  answer_begun_ = answer_sent_ = answer_complete_ = false;
  sent_bytes_ = 0;
  auto wire = std::make_shared<ExchangeWire>(weak_from_this(), stream_.get_executor(), ++serial_);
  exchange_ = std::make_shared<Exchange>(std::move(request), http_1_1, keep_alive, std::move(wire));
  if (around_.handlers.headers) exchange_->set_headers(around_.handlers.headers(exchange_->request()));
  ++around_.counters.answering;
}

// Notices a client that leaves while its answer is being made. What arrives meanwhile may be the next request, a
// farewell of TLS, or the end of what the client sends: it may have closed its side only, and still be reading
// (shutdown(SHUT_WR)). Something is sent to it then: a client that is gone answers that with a reset.
asio::awaitable<void> Connection::watch_client(std::shared_ptr<Exchange> exchange) {
  error_code ec;
  co_await stream_.socket().async_wait(asio::ip::tcp::socket::wait_read, into(ec));
  bool probed = false;
  while (!ec && exchange_ == exchange) {
    pollfd p{stream_.socket().native_handle(), POLLRDHUP, 0};
    if (::poll(&p, 1, 0) < 0) p.revents = 0;
    const bool half_closed = (p.revents & POLLRDHUP) != 0;
    if ((p.revents & (POLLERR | POLLHUP)) != 0 || (half_closed && !exchange->http_1_1() && !answer_begun_)) {
      gone_ = true;
      exchange->client_gone();
      output_.cancel();
      stream_.cancel();
      co_return;
    }
    if (half_closed && !std::exchange(probed, true)) probe_client();
    watch_.expires_after(kWatchInterval);
    co_await watch_.async_wait(into(ec));
  }
}

// HTTP/1.0 has nothing to send before an answer: there such a client counts as gone.
void Connection::probe_client() {
  if (answer_complete_) return;
  if (!answer_begun_)
    push("HTTP/1.1 100 Continue\r\n\r\n");
  else if (exchange_->is_event_stream())
    push(exchange_->comment());
  else
    return;
  output_.cancel();
}

void Connection::push(std::string bytes) {
  queued_bytes_ += bytes.size();
  untaken_.push_back(bytes.size());
  queue_.push_back(std::move(bytes));
}
void Connection::taken(size_t bytes) {
  queued_bytes_ -= bytes;
  while (bytes > 0) {
    const size_t n = std::min(bytes, untaken_.front());
    bytes -= n;
    if ((untaken_.front() -= n) == 0) untaken_.pop_front();
  }
}

// The piece that the client is taking does not count, so that one event may be as large as it likes; nor does what only
// waits for its turn on this thread, which shows in a socket that would take more.
bool Connection::client_is_behind() {
  if (untaken_.empty() || queued_bytes_ - untaken_.front() <= limits_.queued_bytes) return false;
  pollfd p{stream_.socket().native_handle(), POLLOUT, 0};
  return ::poll(&p, 1, 0) == 0;
}

void Connection::queue(uint64_t serial, std::string bytes, bool last) {
  if (serial != serial_ || answer_complete_ || !exchange_ || gone_) return;
  if (!answer_begun_) first_byte_ = Clock::now();
  answer_begun_ = true;
  if (!last && !overrun_ && client_is_behind()) {
    overrun_ = true;
    ++around_.counters.slow_readers;
    stream_.cancel();  // the write that the client does not take
  }
  if (!bytes.empty()) push(std::move(bytes));
  answer_complete_ = last;
  output_.cancel();
}

asio::awaitable<bool> Connection::send_queued() {
  error_code ec;
  std::string bytes;
  const bool answer = answer_begun_;
  while (!queue_.empty()) {  // what has gathered goes out in one write
    bytes += queue_.front();
    queue_.pop_front();
  }
  for (size_t at = 0; at < bytes.size() && !ec;) {
    limit(seconds(limits_.write_seconds));
    const size_t n = co_await over(
        [&](auto& s) { return s.async_write_some(asio::buffer(bytes.data() + at, bytes.size() - at), into(ec)); });
    no_limit();
    at += n;
    sent_bytes_ += n;
    answer_sent_ = answer_sent_ || (answer && n > 0);
    taken(n);
    if (late_ && !overrun_) {
      overrun_ = true;
      ++around_.counters.slow_readers;
    }
    if (overrun_) co_return false;
  }
  co_return !ec;
}

asio::awaitable<bool> Connection::send_answer() {
  error_code ec;
  bool ok = true;
  while (ok && !gone_ && !overrun_) {
    if (!queue_.empty()) {
      ok = co_await send_queued();
      continue;
    }
    if (answer_complete_) break;
    const bool events = answer_begun_ && exchange_->is_event_stream() && limits_.keep_alive_seconds > 0;
    if (events)
      output_.expires_after(seconds(limits_.keep_alive_seconds));
    else
      output_.expires_at(asio::steady_timer::time_point::max());
    co_await output_.async_wait(into(ec));
    // Proxies close what is silent for long, and a client that left shows when it is written to.
    if (!ec && events && queue_.empty() && !answer_complete_) push(exchange_->comment());
  }
  const auto exchange = std::move(exchange_);
  exchange_.reset();
  --around_.counters.answering;
  queue_.clear();
  untaken_.clear();
  queued_bytes_ = 0;
  if (!ok || gone_ || overrun_) {
    if (!overrun_ && !closing_) ++around_.counters.clients_gone;
    log_exchange(*exchange, overrun_ ? "slow_reader" : closing_ ? "shutdown" : "client_gone");
    gone_ = true;
    exchange->client_gone();
  } else {
    log_exchange(*exchange, "complete");
    exchange->finish_without_answer();
  }
  // Ends the watch of this exchange.
  watch_.cancel();
  if (stream_.socket().is_open()) stream_.socket().cancel(ec);
  co_return !gone_ && !closing_ && exchange->keeps_connection();
}

void Connection::log_exchange(const Exchange& exchange, const char* end) {
  if (!around_.handlers.done) return;
  const auto now = Clock::now();
  const auto notes = exchange.notes();
  const bool left = end == std::string_view("client_gone");
  const int status = answer_sent_ || (answer_begun_ && !left) ? exchange.status() : left ? kClientClosed : 0;
  around_.handlers.done({exchange.request(), status, exchange.error_status(), received_bytes_, sent_bytes_,
                         seconds_between(since_, now),
                         answer_begun_ ? seconds_between(since_, std::min(first_byte_, now)) : 0, end, notes});
  received_bytes_ = 0;
}

}  // namespace mi::server
