#pragma once
// What goes wrong with a request, in the public API's shape: {"error": {"message", "type", "param", "code"}}.

#include <optional>
#include <string>

#include "base/json.h"

namespace mi::server {

struct ApiError {
  int status = 400;
  std::string message;
  std::string type = "invalid_request_error";
  std::optional<std::string> param, code;
  double retry_after = 0;  // seconds, of 429: when to come back
};

inline std::string error_json(const ApiError& e) {
  Json j{{"message", e.message}, {"type", e.type}, {"param", nullptr}, {"code", nullptr}};
  if (e.param) j["param"] = *e.param;
  if (e.code) j["code"] = *e.code;
  return dump_json(Json{{"error", std::move(j)}});
}

inline ApiError bad_field(std::string param, std::string message) {
  return {400, std::move(message), "invalid_request_error", std::move(param), {}};
}

}  // namespace mi::server
