#pragma once
// Element types as they occur in files and in memory, and exact conversions between the float kinds.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace mi {

enum class DType : uint8_t { kF64, kF32, kF16, kBF16, kF8E4M3, kF8E5M2, kF8E8M0, kI64, kI32, kI16, kI8, kU64, kU32, kU16, kU8, kBool };

// Bytes of one element.
constexpr size_t dtype_bytes(DType t) {
  switch (t) {
    case DType::kF64: case DType::kI64: case DType::kU64: return 8;
    case DType::kF32: case DType::kI32: case DType::kU32: return 4;
    case DType::kF16: case DType::kBF16: case DType::kI16: case DType::kU16: return 2;
    default: return 1;
  }
}
// The names of the safetensors format: "F32", "BF16", "I8", ... nullopt for an unknown one.
std::optional<DType> dtype_from_name(std::string_view name);
std::string_view dtype_name(DType t);
constexpr bool is_float(DType t) { return t <= DType::kF8E8M0; }

struct BF16 { uint16_t bits; };
struct F16 { uint16_t bits; };

inline float to_f32(BF16 v) { return std::bit_cast<float>(uint32_t(v.bits) << 16); }
// Round to nearest, ties to even; NaN stays a quiet NaN.
inline BF16 to_bf16(float f) {
  uint32_t u = std::bit_cast<uint32_t>(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {uint16_t((u >> 16) | 0x40)};
  return {uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16)};
}
float to_f32(F16 v);
F16 to_f16(float f);

// n elements of type `from` (F32, F16, BF16, F64, I8, I32, U8) widened to float.
void convert_to_f32(const void* src, DType from, float* dst, size_t n);

}  // namespace mi
