#pragma once
// /openapi.json: the tables as an OpenAPI 3.1 document.

#include "base/json.h"

namespace mi::server {
Json openapi(const char* version, bool keys);
}
