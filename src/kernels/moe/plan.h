#pragma once
// Who computes what in a product over experts: pairs sorted by expert, cut into tasks. Private to this folder.

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/moe/grouped.h"

namespace mi::kernels {

// Of one task: most rows, and most floats of what the activation makes of gate and up, which is to stay in the L2 cache.
// Wide tasks prepare rows less often, and one that has all columns quantizes where it is: 128 rows of 768 columns.
inline constexpr int64_t kExpertRows = 128, kExpertFloats = 128 * 768;
inline constexpr int64_t kTasksPerThread =
    16;  // at least, where there are columns enough: the last one to end is waited for

// Rows [first, first + rows) of the sorted pairs, all of one expert, by tiles [tile_begin, tile_end) of its columns.
struct ExpertTask {
  int32_t expert, first, rows, row_block, tile_begin, tile_end;
};

// Kept by the calling thread between steps, so steady work allocates nothing.
class ExpertPlan {
 public:
  static ExpertPlan& of_this_thread();

  // A stable counting sort of the pairs by expert, those of `only` or, when it is empty, all. ids outside [0, experts)
  // are a bug.
  void sort(const RouteRows& route, int64_t tokens, int64_t experts, std::span<const int32_t> only = {});

  // Tasks for products with `tiles` column tiles. The row blocks of a column block are neighbours in the order: its
  // weights are still in a cache.
  std::span<const ExpertTask> split(int64_t tiles, int threads);

  const int32_t* pairs() const { return pairs_.data(); }    // sorted position -> pair
  const int32_t* tokens() const { return tokens_.data(); }  // sorted position -> token
  // Column blocks of a row block still to compute, set by split().
  std::atomic<int32_t>& blocks_left(int32_t row_block) { return left_[size_t(row_block)]; }

 private:
  std::vector<int32_t> start_, next_, pairs_, tokens_;
  std::vector<bool> left_out_;
  std::vector<ExpertTask> tasks_;
  std::unique_ptr<std::atomic<int32_t>[]> left_;
  size_t left_size_ = 0;
};

}  // namespace mi::kernels
