#include "compiler/memory_plan.h"

#include <algorithm>
#include <numeric>

namespace mi::compiler {
namespace {

int64_t size_of(const artifact::Buffer& b) { return b.row_stride * b.rows_per_token; }
bool together(const artifact::Buffer& a, const artifact::Buffer& b) {
  return a.first_instr <= b.last_instr && b.first_instr <= a.last_instr;
}

}  // namespace

int64_t plan_memory(std::vector<artifact::Buffer>& buffers, bool share) {
  if (!share) {
    int64_t at = 0;
    for (artifact::Buffer& b : buffers) {
      b.offset_per_token = at;
      at += size_of(b);
    }
    return at;
  }
  std::vector<size_t> order(buffers.size());
  std::iota(order.begin(), order.end(), size_t(0));
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return size_of(buffers[a]) > size_of(buffers[b]); });

  int64_t arena = 0;
  std::vector<const artifact::Buffer*> placed;  // by offset
  for (size_t i : order) {
    artifact::Buffer& b = buffers[i];
    int64_t at = 0;
    for (const artifact::Buffer* p : placed) {
      if (!together(*p, b)) continue;
      if (p->offset_per_token - at >= size_of(b)) break;  // the gap before p is large enough
      at = std::max(at, p->offset_per_token + size_of(*p));
    }
    b.offset_per_token = at;
    arena = std::max(arena, at + size_of(b));
    placed.insert(std::upper_bound(placed.begin(), placed.end(), at,
                                   [](int64_t v, const artifact::Buffer* p) { return v < p->offset_per_token; }),
                  &b);
  }
  return arena;
}

int64_t unshared_bytes(const std::vector<artifact::Buffer>& buffers) {
  int64_t sum = 0;
  for (const auto& b : buffers) sum += size_of(b);
  return sum;
}

int64_t peak_bytes(const std::vector<artifact::Buffer>& buffers) {
  int32_t last = -1;
  for (const auto& b : buffers) last = std::max(last, b.last_instr);
  std::vector<int64_t> change(size_t(last) + 2, 0);
  for (const auto& b : buffers) {
    change[size_t(b.first_instr)] += size_of(b);
    change[size_t(b.last_instr) + 1] -= size_of(b);
  }
  int64_t now = 0, peak = 0;
  for (int64_t c : change) peak = std::max(peak, now += c);
  return peak;
}

}  // namespace mi::compiler
