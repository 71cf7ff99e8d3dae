#pragma once
// Names of requests: X-Request-Id, and the traceparent header of W3C Trace Context, which OpenTelemetry uses.

#include <optional>
#include <string>
#include <string_view>

namespace mi::server {

// The client's id where it is harmless in logs and headers (letters, digits, - _ . and at most 128), else a new one.
std::string request_id_of(std::string_view given);
std::string new_request_id();

struct TraceParent {
  std::string trace_id, span_id;  // 32 and 16 lower-case hex digits, not all zero
};
// "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"; nothing for what is not in this form.
std::optional<TraceParent> parse_traceparent(std::string_view header);
std::string new_span_id();

}  // namespace mi::server
