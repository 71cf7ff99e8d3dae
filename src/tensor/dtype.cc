#include "tensor/dtype.h"

#include <cmath>
#include <cstring>

#include "base/check.h"

namespace mi {
namespace {

struct NamedType { DType type; std::string_view name; };
constexpr NamedType kNames[] = {
    {DType::kF64, "F64"}, {DType::kF32, "F32"}, {DType::kF16, "F16"}, {DType::kBF16, "BF16"}, {DType::kF8E4M3, "F8_E4M3"}, {DType::kF8E5M2, "F8_E5M2"},
    {DType::kF8E8M0, "F8_E8M0"}, {DType::kI64, "I64"}, {DType::kI32, "I32"}, {DType::kI16, "I16"}, {DType::kI8, "I8"}, {DType::kU64, "U64"},
    {DType::kU32, "U32"}, {DType::kU16, "U16"}, {DType::kU8, "U8"}, {DType::kBool, "BOOL"},
};

template <typename T>
T load(const std::byte* p, size_t i) {
  T v;
  std::memcpy(&v, p + i * sizeof(T), sizeof(T));
  return v;
}

}  // namespace

std::optional<DType> dtype_from_name(std::string_view name) {
  for (const NamedType& n : kNames)
    if (n.name == name) return n.type;
  return std::nullopt;
}

std::string_view dtype_name(DType t) {
  for (const NamedType& n : kNames)
    if (n.type == t) return n.name;
  return "?";
}

float to_f32(F16 v) {
  const uint32_t sign = uint32_t(v.bits & 0x8000) << 16, exponent = (v.bits >> 10) & 31, mantissa = v.bits & 1023;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    const float magnitude = float(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

F16 to_f16(float f) {
  const uint32_t u = std::bit_cast<uint32_t>(f);
  const uint16_t sign = uint16_t((u >> 16) & 0x8000);
  const float a = std::fabs(f);
  if (std::isnan(f)) return {uint16_t(sign | 0x7e00)};
  if (a >= 65520.0f) return {uint16_t(sign | 0x7c00)};
  if (a < 0x1p-14f) return {uint16_t(sign | uint16_t(std::nearbyint(a * 0x1p24f)))};   // subnormal; 1024 is the least normal
  const uint32_t m = u & 0x7fffffffu;
  return {uint16_t(sign | ((m + 0xfffu + ((m >> 13) & 1) - (112u << 23)) >> 13))};
}

void convert_to_f32(const void* src, DType from, float* dst, size_t n) {
  const std::byte* p = static_cast<const std::byte*>(src);
  switch (from) {
    case DType::kF32: std::memcpy(dst, p, n * 4); return;
    case DType::kBF16: for (size_t i = 0; i < n; ++i) dst[i] = to_f32(load<BF16>(p, i)); return;
    case DType::kF16: for (size_t i = 0; i < n; ++i) dst[i] = to_f32(load<F16>(p, i)); return;
    case DType::kF64: for (size_t i = 0; i < n; ++i) dst[i] = float(load<double>(p, i)); return;
    case DType::kI8: for (size_t i = 0; i < n; ++i) dst[i] = float(load<int8_t>(p, i)); return;
    case DType::kU8: for (size_t i = 0; i < n; ++i) dst[i] = float(load<uint8_t>(p, i)); return;
    case DType::kI32: for (size_t i = 0; i < n; ++i) dst[i] = float(load<int32_t>(p, i)); return;
    default: MI_CHECK(false, "no conversion from {} to F32", dtype_name(from));
  }
}

}  // namespace mi
