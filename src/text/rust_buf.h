#pragma once
// What the Rust library hands out: a buffer that frees itself, and its failures as errors. Internal to this room.

#include <string>
#include <string_view>

#include "base/result.h"
#include "mi_text.h"

namespace mi::text {

class RustBuf {
 public:
  RustBuf() = default;
  RustBuf(const RustBuf&) = delete;
  ~RustBuf() { mi_text_buf_free(&buf_); }
  mi_text_buf* out() { return &buf_; }  // for one call
  std::string_view text() const { return {reinterpret_cast<const char*>(buf_.data), buf_.size}; }
  Error error(ErrorCode code = ErrorCode::kBadInput) const { return Error(code, std::string(text())); }

 private:
  mi_text_buf buf_ = {};
};

}  // namespace mi::text
