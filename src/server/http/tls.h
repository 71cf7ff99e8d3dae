#pragma once
// Certificate and key of the server. Internal to server/http but for the reading.

// clang-format off
#include <utility>  // Boost.Asio 1.74 uses std::exchange without including it
// clang-format on

#include <boost/asio/ssl/context.hpp>
#include <memory>
#include <string>

#include "server/http/http_server.h"

namespace mi::server {

struct TlsContext {
  boost::asio::ssl::context context{boost::asio::ssl::context::tls_server};
};

}  // namespace mi::server
