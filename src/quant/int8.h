#pragma once
// Float matrix -> W8A8 weights: symmetric int8, one scale per output row (or one for the whole matrix).
//   scale = max |w| / 127,  q = clamp(round-half-even(w / scale), -127, 127)
// A row of zeros gets scale 0 and zeros.

#include <cstdint>
#include <span>

#include "quant/config.h"

namespace mi::quant {

// w [n, k] row-major -> q [n, k], scale [n].
void quantize_rows(const float* w, int64_t n, int64_t k, WeightScheme scheme, int8_t* q, float* scale);

struct WeightError {
  double err2 = 0, ref2 = 0;  // sums of squares of (q*scale - w) and w
  double relative() const;    // sqrt(err2 / ref2)
};
// scale [n, ceil(k / group)]; with one scale per row, group is k.
void add_error(const float* w, const int8_t* q, const float* scale, int64_t n, int64_t k, int64_t group, WeightError* e);

}  // namespace mi::quant
