#include "server/keys.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <sstream>

#include "base/file.h"

namespace mi::server {
namespace {

std::optional<std::string> after_scheme(const std::string& header, std::string_view scheme) {
  if (header.size() <= scheme.size() || header[scheme.size()] != ' ') return std::nullopt;
  const auto same = [](char want, char c) { return std::tolower(static_cast<unsigned char>(c)) == want; };
  if (!std::equal(scheme.begin(), scheme.end(), header.begin(), same)) return std::nullopt;
  return header.substr(scheme.size() + 1);
}

// "dXNlcjpwYXNz" -> "pass"
std::optional<std::string> basic_password(const std::string& encoded) {
  if (encoded.empty() || encoded.size() % 4 != 0) return std::nullopt;
  std::string text(encoded.size() / 4 * 3, '\0');
  const int n = EVP_DecodeBlock(reinterpret_cast<unsigned char*>(text.data()),
                                reinterpret_cast<const unsigned char*>(encoded.data()), int(encoded.size()));
  if (n < 0) return std::nullopt;
  const size_t padding = size_t(std::count(encoded.end() - 2, encoded.end(), '='));
  text.resize(size_t(n) - padding);
  const size_t colon = text.find(':');
  if (colon == std::string::npos) return std::nullopt;
  return text.substr(colon + 1);
}

bool same_site(const HttpRequest& r) {
  const size_t host = r.origin.find("://");
  return r.origin.empty() || (host != std::string::npos && r.origin.substr(host + 3) == r.host);
}

}  // namespace

KeyRing::Digest KeyRing::digest_of(const std::string& key) {
  Digest d{};
  unsigned int size = 0;
  EVP_Digest(key.data(), key.size(), d.data(), &size, EVP_sha256(), nullptr);
  return d;
}

Result<KeyRing> KeyRing::read(const std::string& file) {
  MI_TRY(const std::string content, read_file(file, size_t(1) << 20));
  KeyRing ring;
  std::istringstream lines(content);
  for (std::string line; std::getline(lines, line);) {
    while (!line.empty() && isspace(static_cast<unsigned char>(line.back()))) line.pop_back();
    if (!line.empty() && line[0] != '#') ring.digests_.push_back(digest_of(line));
  }
  if (ring.digests_.empty()) return bad_input("{}: holds no API key (one a line)", file);
  return ring;
}

// Digests have one length, all are compared, and each comparison takes the same time: how long it takes tells nothing
// about the keys.
bool KeyRing::knows(const std::string& key) const {
  const Digest given = digest_of(key);
  bool found = false;
  for (const Digest& d : digests_) found |= CRYPTO_memcmp(d.data(), given.data(), d.size()) == 0;
  return found;
}

bool KeyRing::admits(const HttpRequest& r) const {
  if (r.authorization.size() + r.api_key.size() != 1) return false;
  if (!r.api_key.empty()) return knows(r.api_key[0]);
  if (const auto key = after_scheme(r.authorization[0], "bearer")) return knows(*key);
  if (const auto pair = after_scheme(r.authorization[0], "basic")) {
    const auto key = basic_password(*pair);
    return key && same_site(r) && knows(*key);
  }
  return false;
}

}  // namespace mi::server
