#include <algorithm>

#include "base/util.h"
#include "tools/verify.h"

namespace mi::tools {

std::string verify_text(const VerifyReport& r) {
  size_t width = 28;
  for (const VerifyRow& row : r.rows) width = std::max(width, row.what.size());
  std::string s = fmt::format("{:<{}} {:>12} {:>12}  {}\n", "what", width, "found", "limit", "unit");
  for (const VerifyRow& row : r.rows)
    s += fmt::format("{:<{}} {:>12.4g} {:>12}  {}{}\n", row.what, width, row.found,
                     row.judged ? fmt::format("{:.4g}", row.limit) : "not judged", row.unit,
                     row.judged && !row.ok ? "   <-- out of limits" : "");
  if (r.tokens > 0) s += fmt::format("mean KL over {} tokens: {:.6f}\n", r.tokens, r.mean_kl);
  s += r.ok() ? "verified: everything within limits\n"
              : fmt::format("NOT verified: the first difference is {}\n", r.first_bad);
  return s;
}

Json verify_json(const VerifyReport& r) {
  Json j{{"ok", r.ok()},
         {"first_difference", r.first_bad},
         {"mean_kl", r.mean_kl},
         {"tokens", r.tokens},
         {"rows", Json::array()}};
  for (const VerifyRow& row : r.rows)
    j["rows"].push_back({{"what", row.what},
                         {"found", row.found},
                         {"limit", row.limit},
                         {"unit", row.unit},
                         {"ok", row.ok},
                         {"judged", row.judged}});
  return j;
}

}  // namespace mi::tools
