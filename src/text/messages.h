#pragma once
// Conversations in files, looked at before a template sees them: its engine's message names neither the line nor the key.

#include <string>

#include "base/json.h"
#include "base/result.h"

namespace mi::text {

// line: an object with "messages" and perhaps "tools". what: its place, "calib.jsonl line 3".
Status check_messages(const Json& line, const std::string& what);

}  // namespace mi::text
