#include "server/cors.h"

#include <algorithm>
#include <cctype>

namespace mi::server {
namespace {

// What clients of OpenAI and Anthropic send. A page that asks for others gets them too, as far as they are names: a
// header says nothing here that its page may not say.
constexpr const char* kHeaders =
    "Authorization, Content-Type, X-Api-Key, Anthropic-Version, Anthropic-Beta, OpenAI-Organization, OpenAI-Project, "
    "X-Request-Id, Traceparent";
constexpr size_t kLongestList = 2000;    // of headers that are asked for
constexpr const char* kSeconds = "600";  // that a browser need not ask again

bool is_name_list(const std::string& s) {
  return !s.empty() && s.size() <= kLongestList && std::all_of(s.begin(), s.end(), [](unsigned char c) {
    return std::isalnum(c) || c == '-' || c == '_' || c == ',' || c == ' ';
  });
}

bool is_origin(const std::string& s) {
  const size_t mark = s.find("://");
  if (mark == std::string::npos || mark == 0 || mark + 3 == s.size()) return false;
  const auto legal = [&](size_t i) {
    const unsigned char c = static_cast<unsigned char>(s[i]);
    const bool letter = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '.';
    return letter || (i < mark ? c == '+' : c == ':' || c == '_' || c == '[' || c == ']');
  };
  for (size_t i = 0; i < s.size(); ++i)
    if ((i < mark || i >= mark + 3) && !legal(i)) return false;
  return true;
}

}  // namespace

Result<Cors> Cors::make(const std::vector<std::string>& origins) {
  Cors c;
  for (std::string o : origins) {
    c.any_ = c.any_ || o == "*";
    if (o == "*") continue;
    if (!is_origin(o))
      return fail(
          ErrorCode::kUsage,
          "--cors-origin {}: an origin is SCHEME://HOST[:PORT] in small letters, without a path; * stands for all", o);
    // Browsers leave out the port that the scheme means anyway.
    for (const auto& [scheme, port] : {std::pair{"http://", ":80"}, std::pair{"https://", ":443"}})
      if (o.starts_with(scheme) && o.ends_with(port)) o.resize(o.size() - std::string(port).size());
    c.origins_.push_back(std::move(o));
  }
  return c;
}

bool Cors::allows(const std::string& origin) const {
  return !origin.empty() && (any_ || std::find(origins_.begin(), origins_.end(), origin) != origins_.end());
}

Headers Cors::headers(const HttpRequest& r) const {
  Headers h;
  // A cache that keeps an answer must not give one site's to another.
  if (!any_ && !origins_.empty()) h.emplace_back("Vary", "Origin");
  if (!allows(r.origin)) return h;
  h.emplace_back("Access-Control-Allow-Origin", any_ ? "*" : r.origin);
  h.emplace_back("Access-Control-Expose-Headers", "X-Request-Id, Retry-After, WWW-Authenticate");
  return h;
}

std::optional<EarlyAnswer> Cors::preflight(const HttpRequest& r) const {
  if (r.method != "OPTIONS" || r.asked_method.empty() || !allows(r.origin)) return std::nullopt;
  std::string allowed = kHeaders;
  if (is_name_list(r.asked_headers)) allowed += ", " + r.asked_headers;
  return EarlyAnswer{204,
                     "",
                     {{"Access-Control-Allow-Methods", "GET, HEAD, POST"},
                      {"Access-Control-Allow-Headers", allowed},
                      {"Access-Control-Max-Age", kSeconds}}};
}

}  // namespace mi::server
