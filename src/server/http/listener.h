#pragma once
// The listening socket: made here, or handed over by a parent process that keeps it (a watchdog, systemd).

#include <string>

#include "base/result.h"

namespace mi::server {

// A bound descriptor: the address is taken, and clients are refused until listen_on(). kEnvironment when the address is
// in use or may not be bound. port 0: a free one.
Result<int> bind_listener(const std::string& host, int port);
// Does nothing to a descriptor that listens already.
Status listen_on(int fd);
// Both.
Result<int> open_listener(const std::string& host, int port);

// The descriptor that a parent handed over by the LISTEN_FDS convention (sd_listen_fds(3)), or -1. Takes the variables
// out of the environment, so that it answers once.
Result<int> inherited_listener();

struct BoundAddress {
  std::string host;
  int port = 0;
};
BoundAddress bound_address(int fd);

}  // namespace mi::server
