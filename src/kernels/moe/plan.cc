#include "kernels/moe/plan.h"

#include <algorithm>

#include "base/check.h"

namespace mi::kernels {

ExpertPlan& ExpertPlan::of_this_thread() {
  static thread_local ExpertPlan plan;
  return plan;
}

void ExpertPlan::sort(const RouteRows& route, int64_t tokens, int64_t experts) {
  start_.assign(size_t(experts) + 1, 0);
  pairs_.resize(size_t(tokens * route.k));
  tokens_.resize(pairs_.size());
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t j = 0; j < route.k; ++j) {
      const int32_t e = route.ids(t)[j];
      MI_CHECK(e >= 0 && e < experts, "token {} chose expert {} of {}", t, e, experts);
      ++start_[size_t(e) + 1];
    }
  for (size_t e = 0; e < size_t(experts); ++e) start_[e + 1] += start_[e];
  next_ = start_;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t j = 0; j < route.k; ++j) {
      const size_t at = size_t(next_[size_t(route.ids(t)[j])]++);
      pairs_[at] = int32_t(t * route.k + j);
      tokens_[at] = int32_t(t);
    }
}

std::span<const ExpertTask> ExpertPlan::split(int64_t tiles, int threads, std::span<const int32_t> only) {
  const size_t experts = only.empty() ? start_.size() - 1 : only.size();
  const auto expert = [&](size_t i) { return only.empty() ? i : size_t(only[i]); };
  // Few rows take the time that reading the weights takes.
  const auto effort = [](int64_t rows) { return std::max<int64_t>(rows, 4); };
  int64_t total = 0, row_blocks = 0;
  for (size_t i = 0; i < experts; ++i)
    if (const int64_t rows = start_[expert(i) + 1] - start_[expert(i)]; rows > 0) {
      total += effort(rows) * tiles;
      row_blocks += (rows + kExpertRows - 1) / kExpertRows;
    }
  const int64_t most = total / (int64_t(threads) * kTasksPerThread);
  if (left_size_ < size_t(row_blocks)) {
    left_size_ = size_t(row_blocks) * 2;
    left_ = std::make_unique<std::atomic<int32_t>[]>(left_size_);
  }

  tasks_.clear();
  int32_t first_block = 0;
  for (size_t i = 0; i < experts; ++i) {
    const size_t e = expert(i);
    const int32_t rows = start_[e + 1] - start_[e];
    if (rows == 0) continue;
    // Equal row blocks: 65 rows are 33 + 32. Column blocks of a multiple of 4 tiles, what a kernel computes at once,
    // and nearly equal.
    const int32_t parts = int32_t((rows + kExpertRows - 1) / kExpertRows);
    const int64_t part_rows = (rows + parts - 1) / parts, widest = kExpertFloats / (part_rows * kNTile);
    const int64_t quads = (tiles + 3) / 4,
                  wanted = std::clamp<int64_t>(most / effort(rows / parts) / 4, 1, widest / 4);
    const int64_t blocks = (quads + wanted - 1) / wanted;
    for (int32_t p = 0; p < parts; ++p)
      left_[size_t(first_block + p)].store(int32_t(blocks), std::memory_order_relaxed);
    for (int64_t b = 0; b < blocks; ++b)
      for (int32_t p = 0; p < parts; ++p) {
        const int32_t from = rows * p / parts, to = rows * (p + 1) / parts;
        tasks_.push_back({int32_t(e), start_[e] + from, to - from, first_block + p,
                          int32_t(std::min(quads * b / blocks * 4, tiles)),
                          int32_t(std::min(quads * (b + 1) / blocks * 4, tiles))});
      }
    first_block += parts;
  }
  return tasks_;
}

}  // namespace mi::kernels
