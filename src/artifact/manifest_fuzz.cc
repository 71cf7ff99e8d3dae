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
  const auto again = parse_manifest(manifest_text(*m), "again");
  MI_CHECK(again.ok(), "{}", again.error().message());
  MI_CHECK(validate(*again, m->memory.weight_bytes).ok(), "valid, written, and then not");
  return 0;
}
