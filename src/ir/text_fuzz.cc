// Any bytes: parsing answers; what parses prints and parses back to the same graph; verifying it does not crash, and
// what is legal survives the passes legally.

#include <cstdint>
#include <cstdlib>

#include "ir/pipeline.h"
#include "ir/text.h"
#include "ir/verify.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace mi::ir;
  auto g = parse({reinterpret_cast<const char*>(data), size});
  if (!g.ok()) return 0;
  const auto again = parse(print(*g));
  if (!again.ok() || !(*again == *g)) std::abort();
  if (!verify(*g).ok()) return 0;
  if (!run_pipeline(*g, {}).ok()) std::abort();
  return 0;
}
