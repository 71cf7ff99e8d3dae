#pragma once
// Which other sites' pages may read the answers (CORS, https://fetch.spec.whatwg.org/#http-cors-protocol). It decides
// about browsers only, and replaces no key: what a page asks for needs the same key as ever.

#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "server/http/http_server.h"

namespace mi::server {

class Cors {
 public:
  Cors() = default;  // no other site's
  // Origins as browsers send them, scheme://host[:port]; "*" stands for all. kUsage for what no browser would send.
  static Result<Cors> make(const std::vector<std::string>& origins);

  // What every answer to r says about it.
  Headers headers(const HttpRequest& r) const;
  // The answer to a browser that asks whether its page may ask; nothing if r is no such question, or if it may not.
  // Browsers send no key with it.
  std::optional<EarlyAnswer> preflight(const HttpRequest& r) const;

 private:
  bool allows(const std::string& origin) const;
  bool any_ = false;
  std::vector<std::string> origins_;
};

}  // namespace mi::server
