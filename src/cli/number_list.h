#pragma once
// "128,512" as numbers.

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"

namespace mi::cli {

inline constexpr const char* kNumberList = "LIST";  // the type of such an option: its value may be empty

// An empty text is an empty list. Error (kUsage) names the flag.
Result<std::vector<int64_t>> parse_numbers(const std::string& list, const char* flag);

}  // namespace mi::cli
