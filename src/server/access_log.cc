#include "server/access_log.h"

#include <chrono>
#include <ctime>

#include "base/json.h"

namespace mi::server {
namespace {

constexpr size_t kLongestPath = 1000, kLongestAgent = 200;  // a line then fits into one write to a pipe

std::string time_text(int64_t ms) {
  const time_t s = time_t(ms / 1000);
  tm t{};
  gmtime_r(&s, &t);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", t.tm_year + 1900, t.tm_mon + 1, t.tm_mday, t.tm_hour,
                     t.tm_min, t.tm_sec, ms % 1000);
}

double thousandths(double seconds) { return double(int64_t(seconds * 1e6 + 0.5)) / 1e3; }

}  // namespace

std::string access_line(const AccessRecord& r) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const int64_t ms = std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
  const HttpRequest& q = r.request;
  Json j{{"time", time_text(ms)},
         {"request_id", q.id},
         {"client", q.peer},
         {"method", q.method},
         {"path", q.path.substr(0, kLongestPath)},
         {"status", r.status},
         {"end", r.end},
         {"bytes_in", r.bytes_in},
         {"bytes_out", r.bytes_out},
         {"first_byte_ms", thousandths(r.first_byte_seconds)},
         {"duration_ms", thousandths(r.seconds)}};
  if (r.error_status != 0) j["error_status"] = r.error_status;
  if (q.tls) j["tls"] = true;
  if (!q.agent.empty()) j["user_agent"] = q.agent.substr(0, kLongestAgent);
  if (!q.trace_id.empty()) {
    j["trace_id"] = q.trace_id;
    j["parent_span_id"] = q.parent_id;
    j["span_id"] = q.span_id;
  }
  for (const auto& [name, value] : r.notes) j[name] = value;
  return dump_json(j);
}

}  // namespace mi::server
