#pragma once
// Random problems for the tests and benchmarks of products. Buffers have exactly the size that the contract asks for,
// so that AddressSanitizer sees any read beyond.

#include <sys/mman.h>

#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "kernels/gemm/gemm.h"
#include "kernels/quantize/quantize.h"
#include "tensor/dtype.h"
#include "tensor/int4.h"

namespace mi::kernels {

constexpr GemmFormat kI8 = GemmFormat::kI8, kI4 = GemmFormat::kI4, kBF16 = GemmFormat::kBF16, kF32 = GemmFormat::kF32;

// Zeroed, 64-byte aligned bytes; large ones in huge pages where allowed, as an engine's weights are.
class AlignedBytes {
 public:
  AlignedBytes() = default;
  explicit AlignedBytes(int64_t bytes) : size_(bytes) {
    const int64_t alignment = bytes > kHuge ? kHuge : 64;
    const size_t whole = size_t((bytes + alignment - 1) / alignment * alignment);
    p_.reset(std::aligned_alloc(size_t(alignment), whole));
    if (alignment == kHuge) madvise(p_.get(), whole, MADV_HUGEPAGE);
    std::memset(p_.get(), 0, whole);
  }
  template <typename T>
  T* as(int64_t byte_offset = 0) {
    return reinterpret_cast<T*>(static_cast<char*>(p_.get()) + byte_offset);
  }
  template <typename T>
  const T* as(int64_t byte_offset = 0) const {
    return reinterpret_cast<const T*>(static_cast<const char*>(p_.get()) + byte_offset);
  }
  int64_t size() const { return size_; }

 private:
  static constexpr int64_t kHuge = 8 << 20;  // four huge pages: small buffers keep their exact size
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  int64_t size_ = 0;
  std::unique_ptr<void, Free> p_;
};

// A packed matrix [n, k] with random values, and its row-major original.
struct PackedMatrix {
  GemmFormat format;
  int64_t n, k, bytes;  // bytes of the packed elements
  AlignedBytes packed, scale, scale_bf16, colsum;
  int64_t group = 0;         // int4
  std::vector<int8_t> i8;    // int8 and int4
  std::vector<float> f32;  // as widened, for the float formats

  PackedMatrix(GemmFormat f, int64_t rows, int64_t cols, std::mt19937& rng, int extreme = 0)
      : format(f), n(rows), k(cols) {
    bytes = pad_n(n) / kNTile * gemm_tile_bytes(f, k);
    packed = AlignedBytes(bytes);
    std::normal_distribution<float> normal;
    if (f == GemmFormat::kI4) {
      const int64_t size = int64_t(32) << rng() % 3;
      int4(rng, extreme, size, rng() % 2 == 0);
      return;
    }
    if (f == GemmFormat::kI8) {
      i8.resize(size_t(n * k));
      for (auto& v : i8) v = extreme != 0 ? int8_t(extreme) : int8_t(int(rng() % 256) - 128);
      pack_i8(i8.data(), n, k, packed.as<int8_t>(), 0);
      scale = AlignedBytes(pad_n(n) * 4);
      colsum = AlignedBytes(pad_n(n) * 4);
      for (int64_t i = 0; i < n; ++i) scale.as<float>()[i] = 0.001f * (1 + float(rng() % 1000) / 1000);
      colsum_i8(i8.data(), n, k, colsum.as<int32_t>());
      return;
    }
    f32.resize(size_t(n * k));
    for (auto& v : f32) v = normal(rng);
    if (f == GemmFormat::kF32) {
      pack_f32(f32.data(), n, k, packed.as<float>(), 0);
      return;
    }
    std::vector<uint16_t> half(f32.size());
    for (size_t i = 0; i < half.size(); ++i) {
      half[i] = to_bf16(f32[i]).bits;
      f32[i] = to_f32(BF16{half[i]});
    }
    pack_bf16(half.data(), n, k, packed.as<uint16_t>(), 0);
  }

  // Scales are bfloat16 numbers, stored as such or as floats.
  void int4(std::mt19937& rng, int extreme, int64_t group_size, bool bf16) {
    group = group_size;
    i8.resize(size_t(n * k));
    for (auto& v : i8) v = extreme != 0 ? int8_t(extreme) : int8_t(int(rng() % 16) - 8);
    const int64_t groups = int4_groups(k, group), row = int4_row_bytes(k);
    std::vector<uint8_t> rows(size_t(n * row));
    for (int64_t i = 0; i < n; ++i) int4_store_row(&i8[size_t(i * k)], k, &rows[size_t(i * row)]);
    pack_i4(rows.data(), n, k, packed.as<uint8_t>(), 0);
    std::vector<float> s(size_t(n * groups));
    for (float& v : s) v = to_f32(to_bf16(0.01f * (float(rng() % 1000) / 500 - 1)));
    scale = AlignedBytes(pad_n(n) * groups * 4);
    pack_scales_i4(s.data(), n, groups, scale.as<float>(), 0);
    scale_bf16 = AlignedBytes(bf16 ? scale.size() / 2 : 0);
    for (int64_t i = 0; bf16 && i < scale.size() / 4; ++i)
      scale_bf16.as<uint16_t>()[i] = to_bf16(scale.as<float>()[i]).bits;
  }
  float int4_scale(int64_t row, int64_t g) const {
    return scale.as<float>()[packed_scale_index(row, g, int4_groups(k, group))];
  }
  // What the matrix is to a product.
  void fill(GemmArgs* a) const {
    a->w = packed.as<char>();
    a->w_scale = scale.as<float>();
    a->w_colsum = colsum.as<int32_t>();
    a->group = group;
    if (scale_bf16.size() == 0) return;
    a->w_scale_bf16 = scale_bf16.as<uint16_t>();
    a->w_scale = nullptr;
  }
};

// Rows of x for products with weights of format f.
struct InputRows {
  int64_t stride, scale_offset = 0;
  AlignedBytes data;

  InputRows(GemmFormat f, int64_t rows, int64_t k, std::mt19937& rng, int extreme = 0) {
    std::normal_distribution<float> normal;
    if (gemm_takes_q8(f)) {
      stride = q8_row_bytes(k);
      scale_offset = q8_scale_offset(k);
      data = AlignedBytes(rows * stride);
      for (int64_t i = 0; i < rows; ++i) {
        int8_t* row = data.as<int8_t>(i * stride);
        for (int64_t j = 0; j < scale_offset; ++j) {
          row[j] = int8_t(int(rng() % 255) - 127);
          if (j >= k && rng() % 2 == 0) row[j] = -128;  // padding: its values must not matter
          if (extreme != 0 && j < k) row[j] = int8_t(extreme);
        }
        *data.as<float>(i * stride + scale_offset) = 0.01f * (1 + float(rng() % 1000) / 1000);
      }
      return;
    }
    stride = k * 4 + 4 * int64_t(rng() % 3);
    data = AlignedBytes(rows * stride);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < k; ++j) data.as<float>(i * stride)[j] = normal(rng);
  }
};

struct GemmCase {
  GemmFormat format;
  int64_t m, n, k;
  std::mt19937 rng;
  PackedMatrix w;
  InputRows x;
  AlignedBytes bias, residual;

  GemmCase(GemmFormat f, int64_t rows, int64_t cols, int64_t depth, unsigned seed = 1, int x_extreme = 0,
           int w_extreme = 0)
      : format(f),
        m(rows),
        n(cols),
        k(depth),
        rng(seed),
        w(f, n, k, rng, w_extreme),
        x(f, m, k, rng, x_extreme),
        bias(n * 4),
        residual(m * n * 4) {
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < n; ++i) bias.as<float>()[i] = normal(rng);
    for (int64_t i = 0; i < m * n; ++i) residual.as<float>()[i] = normal(rng);
  }

  // y: [m, n], dense.
  GemmArgs args(float* y, bool extras = true) const {
    GemmArgs a;
    a.m = m;
    a.n = n;
    a.k = k;
    a.x = x.data.as<char>();
    a.x_stride = x.stride;
    a.x_scale_offset = x.scale_offset;
    w.fill(&a);
    a.y = y;
    a.y_stride = n * 4;
    if (extras) {
      a.bias = bias.as<float>();
      a.out_scale = 0.7f;
      a.residual = residual.as<float>();
      a.residual_stride = n * 4;
    }
    return a;
  }
  GemmRange whole() const { return {0, m, 0, pad_n(n) / kNTile}; }
  std::vector<float> run(const GemmKernel& kernel, bool extras = true) const {
    std::vector<float> y(size_t(m * n), -1e30f);
    gemm_range(kernel, args(y.data(), extras), whole());
    return y;
  }
};

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
}

}  // namespace mi::kernels
