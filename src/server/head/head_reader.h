#pragma once
// The head of an HTTP/1.1 request, piece by piece as it arrives. Beast's parser reads it; what that lets pass although
// RFC 9112 wants it refused, because two programs may read it differently, is refused here, and its size is bounded
// here: the parser's own limit counts only what it has not taken yet.

#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace mi::server {

struct HeadLimits {
  size_t bytes = 64 << 10, fields = 256;
};

struct HeadRefusal {
  int status = 0;
  std::string message;
};

class HeadReader {
 public:
  using Parser = boost::beast::http::request_parser<boost::beast::http::string_body>;
  explicit HeadReader(HeadLimits limits);

  // bytes: all that has come and was not used up. Returns how many of them are used up now. More are needed as long as
  // there is neither an end nor a refusal; a refused request cannot be read on.
  size_t push(std::string_view bytes);
  bool done() const { return done_; }
  const std::optional<HeadRefusal>& refusal() const { return refusal_; }
  Parser& parser() { return parser_; }  // goes on with the body

 private:
  void refuse(int status, std::string message);
  void check_fields();
  HeadLimits limits_;
  Parser parser_;
  size_t used_ = 0;
  bool folded_ = false, done_ = false;
  std::optional<HeadRefusal> refusal_;
};

}  // namespace mi::server
