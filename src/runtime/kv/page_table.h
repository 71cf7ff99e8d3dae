#pragma once
// The pages of one sequence in order of position: page i holds positions [i * kPageTokens, (i + 1) * kPageTokens).
// Filled, shared and released by kv::Cache only.

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

 private:
  friend class Cache;
  std::vector<int32_t> pages_;
  int64_t known_ = 0;  // the first so many pages are whole and found by others
};

}  // namespace mi::runtime::kv
