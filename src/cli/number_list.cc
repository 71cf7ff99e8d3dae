#include "cli/number_list.h"

namespace mi::cli {

Result<std::vector<int64_t>> parse_numbers(const std::string& list, const char* flag) {
  std::vector<int64_t> out;
  for (size_t at = 0; at < list.size();) {
    size_t end = list.find(',', at);
    if (end == std::string::npos) end = list.size();
    const std::string part = list.substr(at, end - at);
    if (part.empty() || part.size() > 9 || part.find_first_not_of("0123456789") != std::string::npos)
      return fail(ErrorCode::kUsage, "{} wants numbers separated by commas, like 128,512; found '{}'", flag, list);
    out.push_back(std::stoll(part));
    at = end + 1;
  }
  return out;
}

}  // namespace mi::cli
