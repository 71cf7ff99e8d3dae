#pragma once

#include <cstdint>

namespace mi::model::gguf_values {

// What the value of a key is, as the file says it.
enum Type : uint32_t { kU8, kI8, kU16, kI16, kU32, kI32, kF32, kBool, kString, kArray, kU64, kI64, kF64 };

}  // namespace mi::model::gguf_values
