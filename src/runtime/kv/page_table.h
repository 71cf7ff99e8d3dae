#pragma once
// The pages of one sequence in order of position: page i holds positions [i * kPageTokens, (i + 1) * kPageTokens).

#include <cstdint>
#include <span>
#include <vector>

#include "base/check.h"
#include "runtime/kv/page_pool.h"

namespace mi::runtime::kv {

class PageTable {
 public:
  PageTable() = default;
  PageTable(const PageTable&) = delete;
  PageTable& operator=(const PageTable&) = delete;
  ~PageTable() { MI_DCHECK(pages_.empty(), "{} pages were never given back", pages_.size()); }

  std::span<const int32_t> pages() const { return pages_; }
  int64_t size() const { return int64_t(pages_.size()); }
  // Grows until `tokens` positions are covered; false, and unchanged, if the pool has too few pages.
  bool cover(PagePool& pool, int64_t tokens) {
    int64_t more = pages_for(tokens) - size();
    return more <= 0 || pool.take(more, &pages_);
  }
  void release(PagePool& pool) {
    pool.give_back(pages_);
    pages_.clear();
  }

 private:
  std::vector<int32_t> pages_;
};

}  // namespace mi::runtime::kv
