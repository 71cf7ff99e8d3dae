#pragma once
// What goes wrong with a request, in the public API's shape: {"error": {"message", "type", "param", "code"}}.

#include <optional>
#include <string>

#include "base/json.h"
#include "base/utf8.h"

namespace mi::server {

struct ApiError {
  int status = 400;
  std::string message;
  std::string type = "invalid_request_error";
  std::optional<std::string> param, code;
  double retry_after = 0;  // seconds, of 429: when to come back
};

// The message as it is sent. Names of a request are shortened where they get into it; this bounds what others compose:
// a grammar's or a template's own words, places within places.
inline std::string sent_message(const ApiError& e) { return shortened(e.message, 1000); }

inline std::string error_json(const ApiError& e) {
  Json j{{"message", sent_message(e)}, {"type", e.type}, {"param", nullptr}, {"code", nullptr}};
  if (e.param) j["param"] = *e.param;
  if (e.code) j["code"] = *e.code;
  return dump_json(Json{{"error", std::move(j)}});
}

inline ApiError bad_field(std::string_view param, std::string message) {
  return {400, std::move(message), "invalid_request_error", shortened(param), {}};
}

}  // namespace mi::server
