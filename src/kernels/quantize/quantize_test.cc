#include "kernels/quantize/quantize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/gemm/gemm_case.h"
#include "kernels/testing.h"

namespace mi::kernels {
namespace {

struct Row {
  AlignedBytes bytes;
  int64_t cols;
  Row(const std::vector<float>& x, const hw::CpuFeatures& cpu, StoredScale stored = {})
      : bytes(q8_row_bytes(int64_t(x.size()))), cols(int64_t(x.size())) {
    std::memset(bytes.as<char>(), 55, size_t(bytes.size()));
    quantize_rows(x.data(), cols * 4, 1, cols, bytes.as<char>(), bytes.size(), cpu, stored);
  }
  int q(int64_t j) const { return bytes.as<int8_t>()[j]; }
  float scale() const { return *bytes.as<float>(q8_scale_offset(cols)); }
};

TEST(Quantize, FollowsTheFormulaOnEveryBuild) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  for (int64_t cols : {1, 15, 16, 63, 64, 65, 500})
    for (float size : {1e-20f, 1.0f, 1e30f}) {
      std::vector<float> x(static_cast<size_t>(cols));
      for (float& v : x) v = normal(rng) * size;
      float m = 0;
      for (float v : x) m = std::max(m, std::abs(v));
      for (const auto& cpu : float_builds()) {
        const Row row(x, cpu);
        ASSERT_EQ(row.scale(), m / 127.0f);
        const float inv = 127.0f / m;
        for (int64_t j = 0; j < cols; ++j) {
          const volatile float scaled = x[size_t(j)] * inv;
          ASSERT_EQ(row.q(j), int(std::nearbyint(scaled))) << hw::describe(cpu) << " column " << j;
        }
        for (int64_t j = cols; j < q8_scale_offset(cols); ++j) ASSERT_EQ(row.q(j), 0) << "padding " << j;
      }
    }
}

TEST(Quantize, TiesGoToEven) {
  for (const auto& cpu : float_builds()) {
    const Row row({127.0f, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f}, cpu);
    EXPECT_EQ(row.scale(), 1.0f);
    EXPECT_EQ((std::vector<int>{row.q(0), row.q(1), row.q(2), row.q(3), row.q(4), row.q(5)}),
              (std::vector<int>{127, 0, 2, 2, 0, -2}));
  }
}

TEST(Quantize, ZerosAndTinyRowsGetScaleZero) {
  for (const auto& cpu : float_builds())
    for (float v : {0.0f, -0.0f, 1e-31f, 1e-44f}) {
      const Row row({v, -v, v}, cpu);
      EXPECT_EQ(row.scale(), 0.0f);
      EXPECT_EQ(row.q(0) | row.q(1) | row.q(2), 0);
    }
}

TEST(Quantize, NanIsZeroAndInfinityIsTheLargestFloat) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const auto& cpu : float_builds()) {
    const Row a({nan, 2.0f, -1.0f}, cpu);
    EXPECT_EQ(a.scale(), 2.0f / 127.0f);
    EXPECT_EQ(a.q(0), 0);
    EXPECT_EQ(a.q(1), 127);
    const Row b({inf, -inf, 1.0f}, cpu);
    EXPECT_EQ(b.scale(), std::numeric_limits<float>::max() / 127.0f);
    EXPECT_EQ((std::vector<int>{b.q(0), b.q(1), b.q(2)}), (std::vector<int>{127, -127, 0}));
  }
}

bool same_row(const Row& a, const Row& b) { return std::memcmp(a.bytes.as<char>(), b.bytes.as<char>(), size_t(a.bytes.size())) == 0; }

TEST(Quantize, AStoredScaleIsThatOfEveryRow) {
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  for (int64_t cols : {1, 16, 63, 200}) {
    std::vector<float> x(static_cast<size_t>(cols));
    for (float& v : x) v = normal(rng);
    for (const float scale : {1e-3f, 0.01f, 0.0137f, 3.0f})
      for (const auto& cpu : float_builds()) {
        const Row row(x, cpu, {scale, false});
        ASSERT_EQ(row.scale(), scale);
        for (int64_t j = 0; j < cols; ++j) {
          const volatile float scaled = x[size_t(j)] * (1.0f / scale);
          ASSERT_EQ(row.q(j), int(std::nearbyint(std::min(std::max(float(scaled), -127.0f), 127.0f)))) << "column " << j;
        }
      }
  }
}

TEST(Quantize, AScaleThatSaturatesIsTheRowsOwnUpToThere) {
  std::mt19937 rng(4);
  std::normal_distribution<float> normal;
  for (int64_t cols : {3, 16, 63, 64, 200}) {
    std::vector<float> x(static_cast<size_t>(cols));
    for (float& v : x) v = normal(rng);
    x[0] = 40;  // the outlier that the scale would be stretched for
    for (const auto& cpu : float_builds()) {
      const Row own(x, cpu), cut(x, cpu, {2.0f / 127, true});
      EXPECT_TRUE(same_row(cut, Row(x, cpu, {2.0f / 127, false}))) << hw::describe(cpu);
      EXPECT_EQ(cut.q(0), 127);
      EXPECT_EQ(cut.scale(), 2.0f / 127);
      // Up to the row's own scale, and at it, nothing changes; a step below it does.
      for (const float most : {40.0f / 127, 1.0f, 1e30f, std::numeric_limits<float>::infinity()})
        EXPECT_TRUE(same_row(Row(x, cpu, {most, true}), own)) << most;
      EXPECT_EQ(Row(x, cpu, {std::nextafter(40.0f / 127, 0.0f), true}).scale(), std::nextafter(40.0f / 127, 0.0f));
      // Nothing stored.
      EXPECT_TRUE(same_row(Row(x, cpu, {0, true}), own));
      EXPECT_TRUE(same_row(Row(x, cpu, {0, false}), own));
      EXPECT_TRUE(same_row(cut, Row(x, {}, {2.0f / 127, true}))) << hw::describe(cpu);  // the same on every build
    }
  }
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const auto& cpu : float_builds()) {
    const Row a({inf, -inf, nan, 0.5f}, cpu, {1.0f / 127, true});
    EXPECT_EQ((std::vector<int>{a.q(0), a.q(1), a.q(2), a.q(3)}), (std::vector<int>{127, -127, 0, 64}));
    EXPECT_EQ(Row({0, 0}, cpu, {1, true}).scale(), 0.0f);
    EXPECT_EQ(Row({1e-31f, 0}, cpu, {1, true}).scale(), 0.0f);
  }
}

TEST(Quantize, ThreadsAndStrides) {
  std::mt19937 rng(2);
  std::normal_distribution<float> normal;
  const int64_t rows = 1000, cols = 70, x_stride = cols * 4 + 12, q_stride = q8_row_bytes(cols) + 64;
  AlignedBytes x(rows * x_stride), one(rows * q_stride), many(rows * q_stride);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) x.as<float>(i * x_stride)[j] = normal(rng);
  quantize_rows(x.as<float>(), x_stride, rows, cols, one.as<char>(), q_stride, {});
  hw::ThreadPool pool(3);
  quantize_run(x.as<float>(), x_stride, rows, cols, many.as<char>(), q_stride, pool);
  EXPECT_EQ(std::memcmp(one.as<char>(), many.as<char>(), size_t(one.size())), 0);
  std::vector<float> back(static_cast<size_t>(cols));
  dequantize_row(one.as<char>(5 * q_stride), cols, back.data());
  for (int64_t j = 0; j < cols; ++j) EXPECT_NEAR(back[size_t(j)], x.as<float>(5 * x_stride)[j], 0.02f);
}

}  // namespace
}  // namespace mi::kernels
