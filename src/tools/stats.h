#pragma once
// Figures from repeated measurements.

#include <cstdint>
#include <span>
#include <string>

namespace mi::tools {

// Of an even number the mean of the middle two. Precondition: not empty.
double median(std::span<const double> v);

struct Interval {
  double low = 0, mid = 0, high = 0;
};

// Percentile bootstrap: samples are drawn with replacement kResamples times; low and high bound the middle `confidence`
// of the results, mid is that of the samples themselves. The same seed gives the same interval. With few samples the
// interval is wide, at most their whole range.
inline constexpr int kResamples = 4000;
// The median of v.
Interval bootstrap_median(std::span<const double> v, double confidence, uint64_t seed);
// median(a) / median(b), the two drawn independently.
Interval bootstrap_ratio(std::span<const double> a, std::span<const double> b, double confidence, uint64_t seed);

}  // namespace mi::tools
