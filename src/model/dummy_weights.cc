#include "model/dummy_weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace mi::model {
namespace {

constexpr size_t kTable = 65536;
constexpr int64_t kChunk = int64_t(1) << 18;  // values

DType dtype_of(const std::string& config) {
  if (config == "float32") return DType::kF32;
  if (config == "float16") return DType::kF16;
  return DType::kBF16;
}

// mean and deviation of a tensor's numbers.
std::pair<float, float> distribution(const ArchSpec& a, const SafetensorsWriter::Decl& d, ir::Mark mark) {
  if (mark == ir::Mark::kNorm) return {a.plus_one ? 0.0f : 1.0f, 0.05f};
  if (d.name.ends_with(".bias") || d.name.ends_with("select_bias")) return {0.0f, 0.02f};
  if (d.name.ends_with(".sinks")) return {0.0f, 1.0f};
  const bool residual = d.name.ends_with("attn.o.weight") || d.name.ends_with(".down.weight");
  const double k = double(d.shape.back());
  return {0.0f, float(1 / std::sqrt(k * (residual ? 2 * double(a.layers) : 1)))};
}

void store(float f, DType t, std::byte* out) {
  if (t == DType::kF32)
    std::memcpy(out, &f, 4);
  else if (t == DType::kF16) {
    const F16 h = to_f16(f);
    std::memcpy(out, &h, 2);
  } else {
    const BF16 b = to_bf16(f);
    std::memcpy(out, &b, 2);
  }
}

// n values of the stream from `first` (a multiple of 4): four 16-bit table indices per random number.
template <typename U>
void fill(const std::byte* table, uint64_t stream, uint64_t first, int64_t n, std::byte* out) {
  for (int64_t i = 0; i < n; i += 4) {
    const uint64_t r = random_u64(stream, (first + uint64_t(i)) / 4);
    for (int64_t j = 0; j < std::min<int64_t>(4, n - i); ++j)
      std::memcpy(out + (i + j) * int64_t(sizeof(U)), table + ((r >> (16 * j)) & 0xffff) * sizeof(U), sizeof(U));
  }
}

}  // namespace

DummyWeights::DummyWeights(const ArchSpec& a, uint64_t seed)
    : a_(a), seed_(seed), dtype_(dtype_of(a.dtype)), normal_(kTable) {
  for (size_t i = 0; i < kTable; ++i) normal_[i] = random_normal(seed_of(seed, "normal"), i);
}

Status DummyWeights::write(const SafetensorsWriter::Decl& d, ir::Mark mark, ir::MirWriter* out, Progress* progress) {
  const auto [mean, deviation] = distribution(a_, d, mark);
  const size_t element = dtype_bytes(d.dtype);
  std::vector<std::byte> table(kTable * element);
  for (size_t i = 0; i < kTable; ++i) store(mean + deviation * normal_[i], d.dtype, table.data() + i * element);
  const uint64_t stream = seed_of(seed_, d.name);
  const int64_t count = *shape_count(d.shape);
  buffer_.resize(size_t(kChunk) * 4);
  for (int64_t at = 0; at < count; at += kChunk) {
    const int64_t n = std::min(kChunk, count - at);
    if (element == 2)
      fill<uint16_t>(table.data(), stream, uint64_t(at), n, buffer_.data());
    else
      fill<uint32_t>(table.data(), stream, uint64_t(at), n, buffer_.data());
    MI_TRY_VOID(out->write({buffer_.data(), size_t(n) * element}));
    progress->advance(uint64_t(n) * element, d.name);
  }
  return {};
}

}  // namespace mi::model
