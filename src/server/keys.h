#pragma once
// API keys. Everything refuses without one, apart from the routes that are open on purpose.

#include <array>
#include <string>
#include <vector>

#include "base/result.h"
#include "server/http/exchange.h"

namespace mi::server {

class KeyRing {
 public:
  // One key a line; blank lines and lines that begin with # are skipped. Refuses a file without keys.
  static Result<KeyRing> read(const std::string& file);

  // A key comes as "Authorization: Bearer KEY" or "X-Api-Key: KEY", once. A browser, which asks its user, sends it as
  // the password of "Authorization: Basic"; it does so for pages of other sites too, hence the look at Origin.
  bool admits(const HttpRequest& r) const;
  size_t size() const { return digests_.size(); }

 private:
  using Digest = std::array<unsigned char, 32>;
  static Digest digest_of(const std::string& key);
  bool knows(const std::string& key) const;
  std::vector<Digest> digests_;
};

}  // namespace mi::server
