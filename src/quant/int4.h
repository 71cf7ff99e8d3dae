#pragma once
// Float matrix -> W4A8 weights: 4 bits, one scale per output row and group of consecutive k.
//   q = clamp(round-half-even(w * (1 / scale)), -8, 7)
// A group's scale is the candidate with the least squared error, the first of equals: max|w| / 8 times each of
// kInt4Clips (above 1 the range holds more than is there, below 1 the largest numbers are cut), rounded to bfloat16, so
// that engines store it in two bytes. Its sign is the opposite of that of the number with max|w|, which then meets -8,
// the end with one step more. A group of zeros, or of numbers too small for a scale, gets scale 0 and zeros.

#include <cstdint>

#include "quant/int8.h"

namespace mi::quant {

inline constexpr float kInt4Clips[] = {8.0f / 7, 1.07f, 1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f, 0.7f, 0.6f, 0.5f};

// w [n, k] row-major -> q [n, k], scale [n, groups].
// importance [k]: of each column's squared error; null: all count the same.
void quantize_rows_int4(const float* w, int64_t n, int64_t k, int64_t group, int8_t* q, float* scale,
                        const float* importance = nullptr);

}  // namespace mi::quant
