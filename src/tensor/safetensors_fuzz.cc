// libFuzzer: the safetensors header. The first byte chooses how many bytes of data follow it.
#include "base/check.h"
#include "tensor/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  const uint64_t data_bytes = uint64_t(data[0]) * 8;
  std::map<std::string, std::string> metadata;
  const auto entries = mi::Safetensors::parse_header({reinterpret_cast<const char*>(data) + 1, size - 1}, data_bytes, "fuzz", &metadata);
  if (!entries.ok()) return 0;
  // Accepted entries cover the data exactly, in order.
  uint64_t at = 0;
  for (const auto& e : *entries) {
    MI_CHECK(e.begin == at && e.end >= e.begin);
    MI_CHECK(uint64_t(*mi::shape_count(e.shape)) * mi::dtype_bytes(e.dtype) == e.end - e.begin);
    at = e.end;
  }
  MI_CHECK(at == data_bytes);
  return 0;
}
