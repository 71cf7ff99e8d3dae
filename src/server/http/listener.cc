#include "server/http/listener.h"

// clang-format off
#include <utility>  // Boost.Asio 1.74 uses std::exchange without including it
// clang-format on

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <boost/asio/ip/address.hpp>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace mi::server {
namespace {

constexpr int kBacklog = 1024;

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
  sockaddr* raw() { return reinterpret_cast<sockaddr*>(&storage); }
};

SocketAddress socket_address(const boost::asio::ip::address& a, int port) {
  SocketAddress s;
  if (a.is_v6()) {
    auto* v6 = reinterpret_cast<sockaddr_in6*>(&s.storage);
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(static_cast<uint16_t>(port));
    const auto bytes = a.to_v6().to_bytes();
    std::memcpy(&v6->sin6_addr, bytes.data(), bytes.size());
    v6->sin6_scope_id = static_cast<uint32_t>(a.to_v6().scope_id());
    s.size = sizeof(*v6);
  } else {
    auto* v4 = reinterpret_cast<sockaddr_in*>(&s.storage);
    v4->sin_family = AF_INET;
    v4->sin_port = htons(static_cast<uint16_t>(port));
    const auto bytes = a.to_v4().to_bytes();
    std::memcpy(&v4->sin_addr, bytes.data(), bytes.size());
    s.size = sizeof(*v4);
  }
  return s;
}

Error cannot_listen(const std::string& host, int port, int error) {
  if (error == EADDRINUSE)
    return fail(ErrorCode::kEnvironment, "{}:{} is in use by another program; give another --port (0 picks a free one)",
                host, port);
  return fail(ErrorCode::kEnvironment, "cannot listen on {}:{}: {}", host, port, std::strerror(error));
}

}  // namespace

Result<int> bind_listener(const std::string& host, int port) {
  boost::system::error_code ec;
  const auto address = boost::asio::ip::make_address(host == "localhost" ? "127.0.0.1" : host, ec);
  if (ec)
    return fail(ErrorCode::kUsage, "--host {}: not an IP address (127.0.0.1 for this machine only, 0.0.0.0 for all)",
                host);
  SocketAddress at = socket_address(address, port);
  const int fd = ::socket(at.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  if (fd >= 0 && ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 && ::bind(fd, at.raw(), at.size) == 0)
    return fd;
  const int error = errno;
  if (fd >= 0) ::close(fd);
  return cannot_listen(host, port, error);
}

Status listen_on(int fd) {
  int listens = 0;
  socklen_t size = sizeof(listens);
  if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 && listens != 0) return {};
  if (::listen(fd, kBacklog) == 0) return {};
  const int error = errno;
  const BoundAddress at = bound_address(fd);
  return cannot_listen(at.host, at.port, error);
}

Result<int> open_listener(const std::string& host, int port) {
  MI_TRY(const int fd, bind_listener(host, port));
  if (Status s = listen_on(fd); !s.ok()) {
    ::close(fd);
    return s.error();
  }
  return fd;
}

Result<int> inherited_listener() {
  const char* pid = std::getenv("LISTEN_PID");
  const char* count = std::getenv("LISTEN_FDS");
  if (!pid || !count || std::strtol(pid, nullptr, 10) != long(::getpid())) return -1;
  const long n = std::strtol(count, nullptr, 10);
  ::unsetenv("LISTEN_PID");
  ::unsetenv("LISTEN_FDS");
  ::unsetenv("LISTEN_FDNAMES");
  if (n == 0) return -1;
  if (n != 1) return fail(ErrorCode::kUsage, "{} listening sockets were handed over (LISTEN_FDS); serve takes one", n);
  constexpr int kFirst = 3;
  int type = 0, listens = 0;
  socklen_t size = sizeof(int);
  SocketAddress at;
  at.size = sizeof(at.storage);
  if (::getsockopt(kFirst, SOL_SOCKET, SO_TYPE, &type, &size) != 0 || type != SOCK_STREAM ||
      ::getsockopt(kFirst, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0 ||
      ::getsockname(kFirst, at.raw(), &at.size) != 0 ||
      (at.storage.ss_family != AF_INET && at.storage.ss_family != AF_INET6))
    return fail(ErrorCode::kUsage, "what was handed over as descriptor 3 (LISTEN_FDS) is no listening TCP socket");
  ::fcntl(kFirst, F_SETFD, FD_CLOEXEC);
  return kFirst;
}

BoundAddress bound_address(int fd) {
  SocketAddress at;
  at.size = sizeof(at.storage);
  if (::getsockname(fd, at.raw(), &at.size) != 0) return {};
  char text[INET6_ADDRSTRLEN] = "";
  if (at.storage.ss_family == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&at.storage);
    ::inet_ntop(AF_INET6, &v6->sin6_addr, text, sizeof(text));
    return {text, ntohs(v6->sin6_port)};
  }
  const auto* v4 = reinterpret_cast<const sockaddr_in*>(&at.storage);
  ::inet_ntop(AF_INET, &v4->sin_addr, text, sizeof(text));
  return {text, ntohs(v4->sin_port)};
}

}  // namespace mi::server
