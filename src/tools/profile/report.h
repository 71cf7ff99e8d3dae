#pragma once
// A profile as text, JSON, a page and a trace.

#include <string>

#include "base/json.h"
#include "tools/profile/profile.h"

namespace mi::tools {

// The longest first; top: how many instructions to list for each scenario.
std::string profile_text(const Profile& p, size_t top);
Json profile_json(const Profile& p);
// A page on its own: inline SVG, no scripts, nothing loaded.
std::string profile_html(const Profile& p);
// Trace event format (chrome://tracing, Perfetto): one step of each scenario, a process each; instructions lie inside
// their layer.
Json profile_trace(const Profile& p);

// "0 to 63 tokens" as a row of eight heights, one for each expert or for equal parts of many.
std::string sparkline(const std::vector<int64_t>& values, size_t width);

}  // namespace mi::tools
