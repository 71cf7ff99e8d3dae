#include "kernels/sample/sample.h"

#include "kernels/testing.h"

namespace mi::kernels {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<float> row_of(int64_t n, uint64_t seed, float size) {
  std::vector<float> row;
  for (int64_t i = 0; i < n; ++i) row.push_back(random_normal(seed, uint64_t(i)) * size);
  if (n > 3) row[size_t(n / 2)] = -kInf;
  return row;
}

TEST(Sample, WeightsAreAccurateAndTheSameOnEveryBuild) {
  for (const int64_t n : {1, 7, 8, 63, 64, 65, 127, 1000, 4096, 5003}) {
    for (const float size : {0.01f, 3.0f, 400.0f}) {
      for (const double scale : {1.0, 0.3, 7.0}) {
        const std::vector<float> row = row_of(n, uint64_t(n), size);
        const double max = max_of_row(row.data(), n, {});
        const size_t room = size_t(weight_blocks(n) * kWeightBlock);
        std::vector<double> first, first_sums;
        for (const auto& cpu : float_builds()) {
          std::vector<double> weights(room + 1, -1.0), sums(size_t(weight_blocks(n)), -1.0);
          weigh_row(row.data(), n, max, scale, weights.data(), sums.data(), cpu);
          ASSERT_EQ(weights.back(), -1.0) << "past its room";
          if (first.empty()) first = weights, first_sums = sums;
          ASSERT_EQ(std::memcmp(first.data(), weights.data(), room * 8), 0) << hw::describe(cpu) << " " << n;
          ASSERT_EQ(std::memcmp(first_sums.data(), sums.data(), sums.size() * 8), 0) << hw::describe(cpu) << " " << n;
        }
        for (int64_t i = 0; i < n; ++i) {
          const double x = (double(row[size_t(i)]) - max) * scale, exact = x > -708 ? std::exp(x) : 0;
          ASSERT_NEAR(first[size_t(i)], exact, exact * 1e-15) << x;
        }
        for (size_t i = size_t(n); i < room; ++i) ASSERT_EQ(first[i], 0);
        for (size_t b = 0; b < first_sums.size(); ++b) {  // the slow twin: the order that the header names
          double lanes[8] = {}, sum = 0;
          for (size_t i = 0; i < size_t(kWeightBlock); ++i) lanes[i % 8] += first[b * size_t(kWeightBlock) + i];
          for (const double lane : lanes) sum += lane;
          ASSERT_EQ(first_sums[b], sum);
        }
      }
    }
  }
}

TEST(Sample, LargestOfARow) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const auto& cpu : float_builds()) {
    EXPECT_EQ(max_of_row(nullptr, 0, cpu), -kInf);
    for (const int64_t n : {1, 5, 15, 16, 17, 33, 1000}) {
      for (int64_t at = 0; at < n; at += 1 + n / 20) {
        std::vector<float> row = row_of(n, 3, 5);
        row[size_t(at)] = 1000;
        EXPECT_EQ(max_of_row(row.data(), n, cpu), 1000) << n << " " << at;
        row[size_t((at + 1) % n)] = nan;
        EXPECT_EQ(max_of_row(row.data(), n, cpu), n > 1 ? 1000 : -kInf) << n << " " << at;
      }
      const std::vector<float> none(size_t(n), -kInf);
      EXPECT_EQ(max_of_row(none.data(), n, cpu), -kInf);
    }
  }
}

}  // namespace
}  // namespace mi::kernels
