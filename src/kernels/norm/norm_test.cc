#include "kernels/norm/norm.h"

#include "kernels/quantize/quantize.h"
#include "kernels/testing.h"

namespace mi::kernels {
namespace {

struct Case {
  int64_t cols, groups;
  bool plus_one;
  float size;
};
const Case kCases[] = {{1, 1, false, 1}, {16, 1, true, 1}, {64, 4, false, 1}, {70, 2, true, 100}, {127, 1, false, 1e-4f}, {512, 8, true, 1}, {1000, 1, false, 3}};

RmsNormArgs args(const Matrix& x, const Matrix& w, Matrix* y) {
  RmsNormArgs a;
  a.rows = x.rows;
  a.cols = x.cols;
  a.x = x.v.data();
  a.x_stride = x.stride();
  a.weight = w.v.data();
  if (y) {
    a.y = y->v.data();
    a.y_stride = y->stride();
  }
  return a;
}

TEST(RmsNorm, WithinTheRoundingOfTheExactResultAndTheSameOnEveryBuild) {
  for (const Case& c : kCases) {
    const NormParams p{1e-6f, c.plus_one, c.groups};
    const int64_t n = c.cols / c.groups;
    const Matrix x(5, c.cols, 7, c.size), w(1, n, 8, 1.0f);
    Matrix first(5, c.cols);
    for (const auto& cpu : float_builds()) {
      Matrix y(5, c.cols);
      rms_norm_rows(p, args(x, w, &y), 0, 5, cpu);
      if (!cpu.avx2) first = y;
      expect_same_bits(first, y, hw::describe(cpu));
    }
    // Chains of n / 64 squares, six levels of the tree, then a handful of single roundings.
    const double tolerance = double(n / 64 + 14) * kUlp;
    for (int64_t i = 0; i < 5; ++i)
      for (int64_t j = 0; j < c.cols; ++j) {
        double sum = 0;
        for (int64_t k = 0; k < n; ++k) sum += double(x.at(i, j / n * n + k)) * x.at(i, j / n * n + k);
        const double weight = double(w.at(0, j % n)) + (c.plus_one ? 1 : 0);
        const double exact = x.at(i, j) / std::sqrt(sum / double(n) + double(1e-6f)) * weight;
        // 1 + w may cancel: its rounding is relative to 1.
        ASSERT_NEAR(first.at(i, j), exact, std::abs(exact) * tolerance + (c.plus_one ? std::abs(exact / weight) * kUlp : 0)) << i << ", " << j;
      }
  }
}

TEST(RmsNorm, QuantizedOutputHasTheBitsOfNormThenQuantize) {
  for (const Case& c : kCases) {
    const NormParams p{1e-5f, c.plus_one, c.groups};
    const Matrix x(3, c.cols, 9, c.size), w(1, c.cols / c.groups, 10, 1.0f);
    for (const auto& cpu : float_builds()) {
      const int64_t stride = q8_row_bytes(c.cols);
      std::vector<char> expected(size_t(3 * stride)), alone(expected), both(expected);
      Matrix y(3, c.cols), y2(3, c.cols);
      rms_norm_rows(p, args(x, w, &y), 0, 3, cpu);
      quantize_rows(y.v.data(), y.stride(), 3, c.cols, expected.data(), stride, cpu);
      RmsNormArgs a = args(x, w, nullptr);
      a.q = alone.data();
      a.q_stride = stride;
      rms_norm_rows(p, a, 0, 3, cpu);
      a = args(x, w, &y2);
      a.q = both.data();
      a.q_stride = stride;
      rms_norm_rows(p, a, 0, 3, cpu);
      expect_same_bits(y, y2, "float output beside the quantized one");
      for (int64_t i = 0; i < 3; ++i) {
        const size_t used = size_t(q8_scale_offset(c.cols) + 4);
        ASSERT_EQ(std::memcmp(expected.data() + i * stride, alone.data() + i * stride, used), 0);
        ASSERT_EQ(std::memcmp(expected.data() + i * stride, both.data() + i * stride, used), 0);
      }
    }
  }
}

TEST(RmsNorm, RowsOfZerosGiveZerosAndThePoolGivesTheSameRows) {
  hw::ThreadPool pool(3);
  const NormParams p;
  Matrix x(40, 2000, 11, 1.0f);
  for (int64_t j = 0; j < 2000; ++j) x.at(7, j) = 0;
  const Matrix w(1, 2000, 12, 1.0f);
  Matrix a(40, 2000), b(40, 2000);
  rms_norm_rows(p, args(x, w, &a), 0, 40);
  rms_norm_run(p, args(x, w, &b), pool);
  expect_same_bits(a, b, "rows split over the pool");
  for (int64_t j = 0; j < 2000; ++j) ASSERT_EQ(a.at(7, j), 0.0f);
}

}  // namespace
}  // namespace mi::kernels
