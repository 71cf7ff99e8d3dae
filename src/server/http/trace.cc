#include "server/http/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>

namespace mi::server {
namespace {

uint64_t random_number() {
  static thread_local std::mt19937_64 rng{std::random_device{}()};
  return rng();
}

bool is_hex(std::string_view s) {
  return std::all_of(s.begin(), s.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}
bool is_id(std::string_view s) { return is_hex(s) && s.find_first_not_of('0') != s.npos; }

}  // namespace

std::string new_request_id() { return fmt::format("req-{:016x}", random_number()); }

std::string request_id_of(std::string_view s) {
  const auto harmless = [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '_' ||
           c == '.';
  };
  if (s.empty() || s.size() > 128 || !std::all_of(s.begin(), s.end(), harmless)) return new_request_id();
  return std::string(s);
}

std::optional<TraceParent> parse_traceparent(std::string_view s) {
  constexpr size_t kSize = 55;  // of version 00; later ones may be longer, and begin the same
  if (s.size() < kSize || s[2] != '-' || s[35] != '-' || s[52] != '-') return std::nullopt;
  const std::string_view version = s.substr(0, 2), trace = s.substr(3, 32), span = s.substr(36, 16);
  if (!is_hex(version) || version == "ff" || !is_id(trace) || !is_id(span) || !is_hex(s.substr(53, 2)))
    return std::nullopt;
  if (s.size() > kSize && (version == "00" || s[kSize] != '-')) return std::nullopt;
  return TraceParent{std::string(trace), std::string(span)};
}

std::string new_span_id() {
  uint64_t n = random_number();
  while (n == 0) n = random_number();
  return fmt::format("{:016x}", n);
}

}  // namespace mi::server
