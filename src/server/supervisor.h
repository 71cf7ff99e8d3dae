#pragma once
// serve --watchdog: a parent process that holds the listening socket and starts this program again as its worker, which
// serves. A worker that crashes, or gives no sign of life, is replaced; clients that connect meanwhile wait in the
// socket's queue instead of being refused.

#include "base/result.h"

namespace mi::server {

inline constexpr const char* kHeartbeatVariable = "METAINFER_HEARTBEAT_FD";
inline constexpr const char* kRestartsVariable = "METAINFER_RESTARTS";

// In a worker: the parent is there.
bool is_supervised();

// Runs workers with this process's own arguments until SIGTERM or SIGINT, which a worker gets too; SIGHUP is passed on
// and ends it, too, unless it reloads.
// silence_seconds: without a sign of life for so long a worker is killed; counted from its first one, so that loading
// may take its time. Returns the exit code. A worker that ends before it ever served is not replaced: its flags or
// files are wrong. Needs a process without threads.
Result<int> supervise(int listener, double silence_seconds, bool reloads);

}  // namespace mi::server
