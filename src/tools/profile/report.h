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

// Pieces of the above.
std::string sparkline(const std::vector<int64_t>& values, size_t width);  // one height per value, or per equal part
std::string step_time(double seconds);                                    // "1.2 s", "35.1 ms", "12.3 us"

}  // namespace mi::tools
