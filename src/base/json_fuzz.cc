// libFuzzer: JSON as it is read from outside; printing what was parsed and parsing it again gives the same.
#include "base/check.h"
#include "base/json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto j = mi::parse_json({reinterpret_cast<const char*>(data), size}, "fuzz");
  if (!j.ok()) return 0;
  const std::string text = mi::dump_json(*j);
  const auto again = mi::parse_json(text, "again");
  MI_CHECK(again.ok() && mi::dump_json(*again) == text);
  return 0;
}
