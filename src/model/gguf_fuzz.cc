// libFuzzer: the header of a GGUF file.
#include "model/gguf.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  (void)mi::model::read_gguf_bytes({reinterpret_cast<const std::byte*>(data), size}, "fuzz");
  return 0;
}
