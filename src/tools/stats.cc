#include "tools/stats.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/check.h"
#include "base/util.h"

namespace mi::tools {
namespace {

std::vector<double> resample(std::span<const double> v, uint64_t seed, uint64_t* counter) {
  std::vector<double> out(v.size());
  for (double& x : out) x = v[size_t(random_u64(seed, (*counter)++) % v.size())];
  return out;
}

template <typename Statistic>
Interval bootstrap(double mid, double confidence, Statistic statistic) {
  MI_CHECK(confidence > 0 && confidence < 1, "confidence {}", confidence);
  std::vector<double> all(kResamples);
  for (double& x : all) x = statistic();
  std::sort(all.begin(), all.end());
  const double tail = (1 - confidence) / 2 * double(kResamples);
  const size_t low = size_t(std::floor(tail));
  return {all[low], mid, all[all.size() - 1 - low]};
}

}  // namespace

double median(std::span<const double> v) {
  MI_CHECK(!v.empty(), "the median of nothing");
  std::vector<double> s(v.begin(), v.end());
  std::sort(s.begin(), s.end());
  return s.size() % 2 ? s[s.size() / 2] : (s[s.size() / 2 - 1] + s[s.size() / 2]) / 2;
}

Interval bootstrap_median(std::span<const double> v, double confidence, uint64_t seed) {
  uint64_t counter = 0;
  return bootstrap(median(v), confidence, [&] { return median(resample(v, seed, &counter)); });
}

Interval bootstrap_ratio(std::span<const double> a, std::span<const double> b, double confidence, uint64_t seed) {
  uint64_t counter = 0;
  return bootstrap(median(a) / median(b), confidence, [&] {
    const double top = median(resample(a, seed, &counter));
    return top / median(resample(b, seed, &counter));
  });
}

}  // namespace mi::tools
