#pragma once
// Which KV pages are free. Ids only: the storage is exec's. A page holds kPageTokens positions of one sequence, all
// layers. free_pages() + used_pages() == total() always; taking a page twice or giving back a free one is a bug.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace mi::runtime::kv {

inline constexpr int64_t kPageTokens = 64;
constexpr int64_t pages_for(int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

class PagePool {
 public:
  // freed: told of every page that was given back; may be empty.
  explicit PagePool(int64_t total, std::function<void(std::span<const int32_t>)> freed = {});
  int64_t total() const { return int64_t(used_.size()); }
  int64_t free_pages() const { return int64_t(free_.size()); }
  int64_t used_pages() const { return total() - free_pages(); }
  // Appends n page ids to out, or changes nothing and returns false when fewer are free.
  bool take(int64_t n, std::vector<int32_t>* out);
  void give_back(std::span<const int32_t> pages);

 private:
  std::vector<int32_t> free_;  // a stack: the page given back last, likely still in the caches, goes out first
  std::vector<bool> used_;
  std::function<void(std::span<const int32_t>)> freed_;
};

}  // namespace mi::runtime::kv
