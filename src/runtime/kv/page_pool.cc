#include "runtime/kv/page_pool.h"

#include "base/check.h"

namespace mi::runtime::kv {

PagePool::PagePool(int64_t total, std::function<void(std::span<const int32_t>)> freed)
    : used_(size_t(total), false), freed_(std::move(freed)) {
  free_.reserve(size_t(total));
  for (int64_t i = total - 1; i >= 0; --i) free_.push_back(int32_t(i));
}

bool PagePool::take(int64_t n, std::vector<int32_t>* out) {
  if (n > free_pages()) return false;
  for (int64_t i = 0; i < n; ++i) {
    int32_t page = free_.back();
    free_.pop_back();
    used_[size_t(page)] = true;
    out->push_back(page);
  }
  return true;
}

void PagePool::give_back(std::span<const int32_t> pages) {
  for (int32_t page : pages) {
    MI_CHECK(page >= 0 && page < total() && used_[size_t(page)], "page {} of {} is not in use", page, total());
    used_[size_t(page)] = false;
    free_.push_back(page);
  }
  if (freed_) freed_(pages);
}

}  // namespace mi::runtime::kv
