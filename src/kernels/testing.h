#pragma once
// For the kernels' tests: the builds this machine can run, and matrices with a gap between rows.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/util.h"
#include "hw/cpu.h"

namespace mi::kernels {

// The scalar build first, then every wider one.
inline std::vector<hw::CpuFeatures> float_builds() {
  const hw::CpuFeatures machine = hw::detect_cpu();
  std::vector<hw::CpuFeatures> all = {{}};
  if (machine.avx2) all.push_back({.avx2 = true});
  if (machine.avx512) all.push_back({.avx2 = true, .avx512 = true});
  if (machine.avx512_bf16) all.push_back({.avx2 = true, .avx512 = true, .avx512_bf16 = true});
  return all;
}

inline constexpr double kUlp = 1.0 / (1 << 24);   // unit roundoff of float
inline constexpr float kGap = 12345.5f;           // what kernels must leave alone

struct Matrix {
  int64_t rows, cols, width;
  std::vector<float> v;
  Matrix(int64_t r, int64_t c, int64_t gap = 3) : rows(r), cols(c), width(c + gap), v(size_t(r * (c + gap)), kGap) {}
  Matrix(int64_t r, int64_t c, uint64_t seed, float size) : Matrix(r, c) {
    for (int64_t i = 0; i < r; ++i)
      for (int64_t j = 0; j < c; ++j) at(i, j) = random_normal(seed, uint64_t(i * c + j)) * size;
  }
  float* row(int64_t i) { return v.data() + i * width; }
  const float* row(int64_t i) const { return v.data() + i * width; }
  float& at(int64_t i, int64_t j) { return row(i)[j]; }
  float at(int64_t i, int64_t j) const { return row(i)[j]; }
  int64_t stride() const { return width * 4; }
};

// Equal bits, gaps included; names the first place that differs.
inline void expect_same_bits(const Matrix& a, const Matrix& b, const std::string& what) {
  ASSERT_EQ(a.v.size(), b.v.size());
  for (size_t i = 0; i < a.v.size(); ++i)
    ASSERT_EQ(std::memcmp(&a.v[i], &b.v[i], 4), 0)
        << what << ": row " << i / size_t(a.width) << " column " << i % size_t(a.width) << ": " << a.v[i] << " and " << b.v[i];
}

}  // namespace mi::kernels
