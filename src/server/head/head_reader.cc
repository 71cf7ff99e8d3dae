#include "server/head/head_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <iterator>

namespace mi::server {
namespace {

namespace beast = boost::beast;
namespace http = beast::http;

// What the parser takes at once are whole lines, so that a line which goes on behind its end shows in one piece.
bool holds_folded_line(std::string_view lines) {
  return lines.find("\n ") != std::string_view::npos || lines.find("\n\t") != std::string_view::npos;
}

// uri-host [ ":" port ], RFC 3986: what it may be made of.
bool is_host(std::string_view s) {
  constexpr std::string_view kMarks = "-._~!$&'()*+;=%:[]";
  return std::all_of(s.begin(), s.end(), [&](unsigned char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           kMarks.find(char(c)) != std::string_view::npos;
  });
}

}  // namespace

HeadReader::HeadReader(HeadLimits limits) : limits_(limits) {
  parser_.header_limit(UINT32_MAX);
  parser_.body_limit(UINT64_MAX);  // the connection's affair, with an answer (Beast 1.74 takes "none" for zero)
}

void HeadReader::refuse(int status, std::string message) {
  if (!refusal_) refusal_ = {status, std::move(message)};
}

size_t HeadReader::push(std::string_view bytes) {
  boost::system::error_code ec;
  const size_t used = parser_.put(boost::asio::const_buffer(bytes.data(), bytes.size()), ec);
  used_ += used;
  folded_ = folded_ || holds_folded_line(bytes.substr(0, used));
  done_ = parser_.is_header_done();
  if (used_ + (done_ ? 0 : bytes.size() - used) > limits_.bytes)
    refuse(431, fmt::format("the request's headers are larger than {} bytes", limits_.bytes));
  const auto& fields = parser_.get();
  if (size_t(std::distance(fields.begin(), fields.end())) > limits_.fields)
    refuse(431, fmt::format("the request has more than {} headers", limits_.fields));
  if (ec && ec != http::error::need_more) refuse(400, "the request is not valid HTTP");
  if (done_) check_fields();
  return used;
}

void HeadReader::check_fields() {
  const auto& head = parser_.get();
  const size_t hosts = head.count(http::field::host), codings = head.count(http::field::transfer_encoding),
               lengths = head.count(http::field::content_length);
  const bool http_1_1 = head.version() >= 11;
  // RFC 9112, 5.2.
  if (folded_) refuse(400, "a header goes on in the next line, which HTTP/1.1 no longer allows");
  // RFC 9112, 3.2.
  if (hosts > 1 || (hosts == 0 && http_1_1))
    refuse(400, fmt::format("the request has {} Host headers; it must have one", hosts));
  if (hosts == 1 && !is_host(std::string(head[http::field::host]))) refuse(400, "the Host header is no host");
  // Two ways to tell where a request ends are two places where it may end (RFC 9112, 6.1).
  if (codings > 0 && lengths > 0) refuse(400, "the request has both a Content-Length and a Transfer-Encoding");
  if (lengths > 1) refuse(400, "the request has two Content-Length headers");
  // Where another coding ends, or what is in it, is not understood here (RFC 9112, 6.3).
  if (codings > 0 && (codings > 1 || !http_1_1 || !beast::iequals(head[http::field::transfer_encoding], "chunked")))
    refuse(400, "the only Transfer-Encoding that is understood is chunked alone, in HTTP/1.1");
}

}  // namespace mi::server
