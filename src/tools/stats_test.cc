#include "tools/stats.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/util.h"

namespace mi::tools {
namespace {

TEST(Stats, MedianOfOddAndEven) {
  EXPECT_EQ(median(std::vector<double>{3, 1, 2}), 2);
  EXPECT_EQ(median(std::vector<double>{4, 1, 3, 2}), 2.5);
  EXPECT_EQ(median(std::vector<double>{7}), 7);
}

std::vector<double> noisy(uint64_t seed, double middle, double spread, int n) {
  std::vector<double> v;
  for (int i = 0; i < n; ++i) v.push_back(middle * (1 + spread * (double(random_unit(seed, uint64_t(i))) - 0.5)));
  return v;
}

TEST(Stats, BootstrapBracketsTheMedianAndIsRepeatable) {
  const auto v = noisy(1, 10, 0.4, 15);
  const Interval a = bootstrap_median(v, 0.95, 3), b = bootstrap_median(v, 0.95, 3),
                 narrow = bootstrap_median(v, 0.5, 3);
  EXPECT_EQ(a.mid, median(v));
  EXPECT_LE(a.low, a.mid);
  EXPECT_GE(a.high, a.mid);
  EXPECT_LT(a.low, a.high);
  EXPECT_EQ(a.low, b.low);
  EXPECT_EQ(a.high, b.high);
  EXPECT_LE(narrow.high - narrow.low, a.high - a.low);
}

TEST(Stats, OneValueHasNoSpread) {
  const Interval i = bootstrap_ratio(std::vector<double>{6}, std::vector<double>{3}, 0.95, 1);
  EXPECT_EQ(i.low, 2);
  EXPECT_EQ(i.mid, 2);
  EXPECT_EQ(i.high, 2);
}

// Two sets from one distribution: about one interval in twenty may miss the truth, not more than a few.
TEST(Stats, IntervalOfARatioCoversTheTruth) {
  int missed = 0;
  for (uint64_t s = 0; s < 100; ++s) {
    const Interval i = bootstrap_ratio(noisy(2 * s, 10, 0.2, 11), noisy(2 * s + 1, 10, 0.2, 11), 0.95, s);
    missed += i.low > 1 || i.high < 1;
  }
  EXPECT_LE(missed, 12);
  const Interval slower = bootstrap_ratio(noisy(500, 8, 0.05, 11), noisy(501, 10, 0.05, 11), 0.95, 1);
  EXPECT_LT(slower.high, 0.9);
  EXPECT_GT(slower.low, 0.7);
}

}  // namespace
}  // namespace mi::tools
