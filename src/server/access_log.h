#pragma once
// A line of the access log: one JSON object for each answered request.

#include <string>

#include "server/http/exchange.h"

namespace mi::server {

std::string access_line(const AccessRecord& r);  // of a request that ended now

}  // namespace mi::server
