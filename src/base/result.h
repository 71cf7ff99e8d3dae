#pragma once
// Result<T>: a value, or an Error that says what went wrong in the outside world (files, configs, artifacts,
// flags, HTTP bodies, memory limits). Bugs are not errors: they end in MI_CHECK (check.h). Ordinary outcomes
// (no page free, queue full) are plain return values. No exception crosses a room: adapters catch what
// third-party code throws and turn it into an Error.
//
//   Result<Config> load(const Path& p) {
//     MI_TRY(auto text, read_file(p));                 // returns the error to the caller
//     ...
//     return fail(ErrorCode::kBadInput, "{}: hidden_size is missing", p.string());
//   }
//   auto r = load(p); if (!r.ok()) return r.error().with_context("while reading the model");

#include <fmt/format.h>

#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "base/check.h"

namespace mi {

// The values are the process exit codes.
enum class ErrorCode : int {
  kCheckFailed = 1,   // the check that the command ran did not hold (verify, eval limits)
  kUsage = 2,         // flags or requests that make no sense
  kEnvironment = 3,   // no device, no memory, disk full, port in use
  kBadInput = 4,      // a file, model, config or artifact that cannot be believed
};

class [[nodiscard]] Error {
 public:
  Error(ErrorCode code, std::string message) : code_(code), message_(std::move(message)) {}
  ErrorCode code() const { return code_; }
  const std::string& message() const { return message_; }
  // "context: message"; the outer words come first.
  Error with_context(const std::string& context) const { return Error(code_, context + ": " + message_); }

 private:
  ErrorCode code_;
  std::string message_;
};

template <typename... Args>
Error fail(ErrorCode code, fmt::format_string<Args...> f, Args&&... args) {
  return Error(code, fmt::format(f, std::forward<Args>(args)...));
}
template <typename... Args>
Error bad_input(fmt::format_string<Args...> f, Args&&... args) {
  return Error(ErrorCode::kBadInput, fmt::format(f, std::forward<Args>(args)...));
}

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : v_(std::in_place_index<0>, std::move(value)) {}  // NOLINT: implicit on purpose
  Result(Error error) : v_(std::in_place_index<1>, std::move(error)) {}  // NOLINT
  bool ok() const { return v_.index() == 0; }
  explicit operator bool() const { return ok(); }
  // Precondition: ok().
  T& value() & { MI_CHECK(ok(), "{}", error_text()); return std::get<0>(v_); }
  const T& value() const& { MI_CHECK(ok(), "{}", error_text()); return std::get<0>(v_); }
  T&& value() && { MI_CHECK(ok(), "{}", error_text()); return std::get<0>(std::move(v_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  const Error& error() const { MI_CHECK(!ok(), "error() of an ok result"); return std::get<1>(v_); }

 private:
  std::string error_text() const { return ok() ? "" : std::get<1>(v_).message(); }
  std::variant<T, Error> v_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : e_(std::move(error)) {}  // NOLINT
  bool ok() const { return !e_; }
  explicit operator bool() const { return ok(); }
  void value() const { MI_CHECK(ok(), "{}", e_->message()); }
  const Error& error() const { MI_CHECK(!ok(), "error() of an ok result"); return *e_; }

 private:
  std::optional<Error> e_;
};
using Status = Result<void>;

#define MI_CONCAT_(a, b) a##b
#define MI_CONCAT(a, b) MI_CONCAT_(a, b)
// MI_TRY(auto x, expr): x = value of expr, or return its error. MI_TRY_VOID(expr) for Status.
#define MI_TRY(decl, ...) MI_TRY_(MI_CONCAT(mi_try_, __COUNTER__), decl, __VA_ARGS__)
#define MI_TRY_(tmp, decl, ...)         \
  auto tmp = (__VA_ARGS__);             \
  if (!tmp.ok()) return tmp.error();    \
  decl = std::move(tmp).value()
#define MI_TRY_VOID(...)                                       \
  do {                                                         \
    auto mi_st_ = (__VA_ARGS__);                               \
    if (!mi_st_.ok()) return mi_st_.error();                   \
  } while (0)

}  // namespace mi
