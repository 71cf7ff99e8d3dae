#include "runtime/stats.h"

#include <algorithm>

namespace mi::runtime {

void Histogram::add(double seconds) {
  ++counts[size_t(std::lower_bound(kBounds.begin(), kBounds.end(), seconds) - kBounds.begin())];
  ++count;
  sum += seconds;
}

}  // namespace mi::runtime
