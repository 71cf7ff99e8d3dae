#pragma once
// Error-compensating rounding: columns of a matrix are rounded one after the other, and what each one's rounding adds
// to the output on calibration data is taken back by the columns that are still float.
//
// For H = X^T X of the inputs (damped), U upper triangular with H^-1 = U^T U, and column j in the order of falling
// H_jj:  e = (w_j - round(w_j)) / U_jj;  w_m -= e U_jm  for the columns m behind j.
// (Frantar et al., "GPTQ", 2022; the order by H_jj is its "act-order". Groups keep the places of the file: their scales
// are chosen before the first column is rounded.)
// Then, while it helps, each number moves to the whole one that is best for all others as they are; and scales of groups
// to what fits the whole numbers best, all groups of a row together.

#include <cstdint>
#include <span>
#include <vector>

#include "quant/config.h"

namespace mi::quant {

class ErrorSpread {
 public:
  // gram [k, k] = X^T X over `tokens` rows. damping: of the mean diagonal, added to the diagonal. Columns that were
  // never fed anything are rounded to nearest.
  ErrorSpread(std::vector<float> gram, int64_t k, double damping);

  // Rows w [n, k] -> q [n, k] for scales that are fixed: scale [n, groups] with one for `group` columns. low, high: the
  // smallest and largest q.
  void round_rows(const float* w, int64_t n, const float* scale, int64_t group, int low, int high, int8_t* q) const;
  // ... for scales that are a first guess: they move, to other numbers of bfloat16.
  void round_groups(const float* w, int64_t n, float* scale, int64_t group, int low, int high, int8_t* q) const;

  // H_jj by column: how much its rounding error counts, alone.
  std::vector<float> diagonal() const;
  int64_t k() const { return k_; }

 private:
  struct Rows;
  void spread(Rows& r) const;
  void gradient(Rows& r) const;
  void settle(Rows& r) const;
  void fit_scales(Rows& r, float* scale) const;
  void round(const float* w, int64_t n, const float* scale, float* fitted, int64_t group, int low, int high, int8_t* q) const;

  int64_t k_ = 0;
  std::vector<int32_t> order_;  // place in the order -> column
  std::vector<float> u_;        // [k, k], in that order
  std::vector<float> h_;        // [k, k], damped, in the order of the matrix
};

}  // namespace mi::quant
