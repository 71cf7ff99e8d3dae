#include "server/http/tls.h"

#include <openssl/err.h>
#include <openssl/ssl.h>

#include <cstring>
#include <filesystem>

namespace mi::server {
namespace {

std::string last_tls_error() {
  const unsigned long code = ERR_get_error();
  const char* reason = code ? ERR_reason_error_string(code) : nullptr;
  ERR_clear_error();
  return reason ? reason : "unreadable";
}

// HTTP/1.1 is what is spoken; a client that also offers h2 must not come to think otherwise.
int choose_protocol(SSL*, const unsigned char** out, unsigned char* out_size, const unsigned char* offered,
                    unsigned int size, void*) {
  static const char want[] = "http/1.1";
  constexpr unsigned char kWant = sizeof(want) - 1;
  for (unsigned int i = 0; i < size && i + 1 + offered[i] <= size; i += 1u + offered[i]) {
    if (offered[i] != kWant || std::memcmp(offered + i + 1, want, kWant) != 0) continue;
    *out = offered + i + 1;
    *out_size = kWant;
    return SSL_TLSEXT_ERR_OK;
  }
  return SSL_TLSEXT_ERR_NOACK;
}

}  // namespace

Result<std::shared_ptr<TlsContext>> read_tls(const std::string& certificate, const std::string& key) {
  auto tls = std::make_shared<TlsContext>();
  SSL_CTX* c = tls->context.native_handle();
  ERR_clear_error();
  SSL_CTX_set_min_proto_version(c, TLS1_2_VERSION);
  SSL_CTX_set_options(c, SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION | SSL_OP_CIPHER_SERVER_PREFERENCE);
  SSL_CTX_set_alpn_select_cb(c, choose_protocol, nullptr);
  std::error_code ignored;
  for (const auto& [flag, path] : {std::pair{"--tls-cert", &certificate}, std::pair{"--tls-key", &key}})
    if (!std::filesystem::is_regular_file(*path, ignored)) return bad_input("{} {}: is no file", flag, *path);
  if (SSL_CTX_use_certificate_chain_file(c, certificate.c_str()) != 1)
    return bad_input("--tls-cert {}: no certificate in PEM form ({})", certificate, last_tls_error());
  // A key with a password would ask for it on the terminal.
  SSL_CTX_set_default_passwd_cb(c, [](char*, int, int, void*) { return 0; });
  if (SSL_CTX_use_PrivateKey_file(c, key.c_str(), SSL_FILETYPE_PEM) != 1)
    return bad_input("--tls-key {}: no key without password in PEM form, or not the certificate's ({})", key,
                     last_tls_error());
  if (SSL_CTX_check_private_key(c) != 1)
    return bad_input("--tls-key {}: is not the key of the certificate {}", key, certificate);
  return tls;
}

}  // namespace mi::server
