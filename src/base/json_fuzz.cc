// libFuzzer: JSON as it is read from outside. Printing what was parsed and parsing it again gives the same; so does
// reading an object member by member.
#include "base/check.h"
#include "base/json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto j = mi::parse_json(text, "fuzz");
  mi::JsonLimits last_counts;
  last_counts.refuse_duplicate_keys = false;
  const auto lenient = mi::parse_json(text, "fuzz", last_counts);
  mi::Json members = mi::Json::object();
  const mi::Status s = mi::parse_json_members(text, "fuzz", {}, [&](std::string key, mi::Json value) -> mi::Status {
    members[key] = std::move(value);
    return {};
  });
  MI_CHECK_EQ(s.ok(), j.ok() && j->is_object());
  if (!j.ok()) return 0;
  MI_CHECK(lenient.ok() && *lenient == *j);
  MI_CHECK(!j->is_object() || members == *j);
  const std::string printed = mi::dump_json(*j);
  const auto again = mi::parse_json(printed, "again");
  MI_CHECK(again.ok() && mi::dump_json(*again) == printed);
  return 0;
}
