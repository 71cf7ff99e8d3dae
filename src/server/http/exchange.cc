#include "server/http/exchange.h"

#include <fmt/format.h>

#include <mutex>

namespace mi::server {

struct Exchange::Shared {
  std::mutex mutex;
  bool gone = false;
  std::function<void()> call;
  std::vector<std::pair<std::string, int64_t>> notes;
};
std::shared_ptr<Exchange::Shared> Exchange::make_shared_part() { return std::make_shared<Shared>(); }

const char* status_text(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 204:
      return "No Content";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 411:
      return "Length Required";
    case 413:
      return "Payload Too Large";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case 500:
      return "Internal Server Error";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    case 504:
      return "Gateway Timeout";
  }
  return "Status";
}

std::string Exchange::head(int status, std::string_view content_type, const Headers& extra, const char* framing) {
  status_ = status;
  std::string h = fmt::format("HTTP/1.1 {} {}\r\nServer: metainfer\r\nX-Request-Id: {}\r\nConnection: {}\r\n", status,
                              status_text(status), request_.id, keep_alive_ ? "keep-alive" : "close");
  if (!content_type.empty()) h += fmt::format("Content-Type: {}\r\n", content_type);
  for (const Headers* list : {&extra, static_cast<const Headers*>(&always_)})
    for (const auto& [name, value] : *list) h += fmt::format("{}: {}\r\n", name, value);
  return h + framing + "\r\n";
}

void Exchange::respond(int status, std::string_view content_type, std::string_view body, const Headers& extra) {
  constexpr int kNoContent = 204;  // has no length either (RFC 9110, 8.6)
  if (status == kNoContent) return wire_->send(head(status, "", extra, ""), true);
  std::string bytes = head(status, content_type, extra, fmt::format("Content-Length: {}\r\n", body.size()).c_str());
  if (request_.method != "HEAD") bytes += body;
  wire_->send(std::move(bytes), true);
}

void Exchange::begin_stream(std::string_view content_type) {
  // HTTP/1.0 knows no chunks: there the end of the connection is the end of the body.
  if (!http_1_1_) keep_alive_ = false;
  events_ = content_type.starts_with("text/event-stream");
  wire_->send(head(200, content_type, {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}},
                   http_1_1_ ? "Transfer-Encoding: chunked\r\n" : ""),
              false);
}

std::string Exchange::framed(std::string_view bytes) const {
  return http_1_1_ ? fmt::format("{:x}\r\n{}\r\n", bytes.size(), bytes) : std::string(bytes);
}
std::string Exchange::comment() const { return framed(": keep-alive\n\n"); }

void Exchange::write(std::string_view bytes) {
  if (!bytes.empty()) wire_->send(framed(bytes), false);
}

void Exchange::end_stream() { wire_->send(http_1_1_ ? "0\r\n\r\n" : "", true); }

void Exchange::note(std::string name, int64_t value) {
  std::lock_guard lock(shared_->mutex);
  shared_->notes.emplace_back(std::move(name), value);
}
std::vector<std::pair<std::string, int64_t>> Exchange::notes() const {
  std::lock_guard lock(shared_->mutex);
  return shared_->notes;
}

void Exchange::on_gone(std::function<void()> f) {
  {
    std::lock_guard lock(shared_->mutex);
    if (!shared_->gone) {
      shared_->call = std::move(f);
      return;
    }
  }
  f();
}

void Exchange::client_gone() {
  std::function<void()> call;
  {
    std::lock_guard lock(shared_->mutex);
    if (shared_->gone) return;
    shared_->gone = true;
    call = std::move(shared_->call);
    shared_->call = nullptr;
  }
  if (call) call();
}

void Exchange::finish_without_answer() {
  std::lock_guard lock(shared_->mutex);
  shared_->call = nullptr;
}

}  // namespace mi::server
