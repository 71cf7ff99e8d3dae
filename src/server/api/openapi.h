#pragma once
// /openapi.json: the tables as an OpenAPI 3.1 document.

#include <string>
#include <vector>

#include "base/json.h"

namespace mi::server {
// models: the names that are served; keys: whether they are needed.
Json openapi(const char* version, const std::vector<std::string>& models, bool keys);
}  // namespace mi::server
