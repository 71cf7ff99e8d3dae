#pragma once
// Zeroed memory straight from the kernel, committed page by page when first touched.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "hw/thread_pool.h"

namespace mi::exec {

class Region {
 public:
  // `what` names the memory in the error ("the KV cache"). Asks for huge pages when `huge`. 0 bytes: an empty region.
  static Result<Region> map(int64_t bytes, const std::string& what, bool huge = true);
  // Whole 4 KB pages within [p, p + bytes) are zero again and take no memory. In a region of huge pages the kernel may
  // keep what it gives back.
  void forget(std::byte* p, int64_t bytes);
  // Deals the pages out over these memory nodes (one: all of them there), before they are touched. Without the right to
  // ask, or such nodes, false: pages go where the kernel likes.
  bool place_on(const std::vector<int>& nodes) { return place_on(nodes, 0, bytes_); }
  // The same for a part, from a multiple of 4 KB on.
  bool place_on(const std::vector<int>& nodes, int64_t from, int64_t bytes);
  // Has the kernel commit all pages now, by the pool's threads, so that no step waits for it.
  void commit(hw::ThreadPool& pool);
  Region() = default;
  Region(Region&&) noexcept;
  Region& operator=(Region&&) noexcept;
  ~Region();
  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace mi::exec
