#pragma once
// Records of many runs in one file, a line each, and their plot.

#include <string>
#include <vector>

#include "tools/bench/record.h"

namespace mi::tools {

// What a killed run left of its line, without an end, is no run and passed over. Error (kBadInput) names the file and
// the line that is no record.
Result<std::vector<BenchRecord>> read_history(const Path& p);
// Refuses a file that holds something else, so that nothing is appended to a file named by mistake, and one that cannot
// be written to; a missing or empty one is fine. To be asked before minutes of measuring; nothing is changed.
Status check_history(const Path& p);
// Appends a whole line or nothing. Runs that append at the same time wait for each other.
Status append_history(const Path& p, const BenchRecord& r);

// The newest `last` runs as a table.
std::string history_text(const std::vector<BenchRecord>& all, size_t last);
// Curves per figure over the runs: one line for each machine, engine and settings, the rounds' spread behind it. No
// scripts.
std::string history_html(const std::vector<BenchRecord>& all, const std::string& title);

}  // namespace mi::tools
