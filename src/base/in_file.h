#pragma once
// in_file(r, "data.jsonl line 3"): what is wrong with a text is the caller's fault in general (kUsage), and bad input
// where it came from a file, which the message then names.

#include <string>

#include "base/result.h"

namespace mi {

template <typename T>
Result<T> in_file(Result<T> r, const std::string& where) {
  if (r.ok()) return r;
  return bad_input("{}: {}", where, r.error().message());
}

}  // namespace mi
