#pragma once
// Rows of 4-bit numbers as files hold them (U8 tensors): byte j of a row has element 2j in its low half and 2j + 1 in its
// high half, each as q + 8, q in [-8, 7]. A row of an odd number of elements ends with a zero (8).

#include <cstdint>

namespace mi {

constexpr int64_t int4_row_bytes(int64_t k) { return (k + 1) / 2; }
constexpr bool int4_group_ok(int64_t group) { return group == 32 || group == 64 || group == 128; }
// Groups of `group` consecutive elements; the last one may be shorter.
constexpr int64_t int4_groups(int64_t k, int64_t group) { return (k + group - 1) / group; }

inline int8_t int4_at(const uint8_t* row, int64_t i) { return int8_t((row[i / 2] >> (i % 2 * 4) & 15) - 8); }

// q [k], each in [-8, 7] -> row [int4_row_bytes(k)]
inline void int4_store_row(const int8_t* q, int64_t k, uint8_t* row) {
  for (int64_t j = 0; j < int4_row_bytes(k); ++j)
    row[j] = uint8_t((q[2 * j] + 8) | (2 * j + 1 < k ? q[2 * j + 1] + 8 : 8) << 4);
}

}  // namespace mi
