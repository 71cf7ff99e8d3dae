// libFuzzer: any text as engine.json. Neither parsing nor validation may crash, and what both accept must survive a
// trip through JSON.

#include "artifact/json.h"
#include "artifact/validate.h"
#include "base/check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace mi::artifact;
  const auto m = parse_manifest({reinterpret_cast<const char*>(data), size}, "fuzz");
  if (!m.ok()) return 0;
  if (!validate(*m, m->memory.weight_bytes).ok()) return 0;
  const std::string text = manifest_text(*m);
  const auto again = parse_manifest(text, "again");
  MI_CHECK(again.ok(), "{}", again.error().message());
  MI_CHECK(validate(*again, m->memory.weight_bytes).ok(), "valid, written, and then not");
  MI_CHECK_EQ(manifest_text(*again), text);
  return 0;
}
