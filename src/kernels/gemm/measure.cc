#include "kernels/gemm/measure.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "kernels/rows.h"
#include "tensor/int4.h"

namespace mi::kernels {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kRotate = int64_t(256) << 20;  // more than the caches hold
constexpr double kSlice = 0.006;                 // seconds of one measurement; the fastest of kSlices counts
constexpr int kSlices = 5;
constexpr int64_t kMostProducts = int64_t(1) << 26;  // of one thread in one measured product: the reference takes 0.1 s

}  // namespace

void GemmMeasure::Free::operator()(char* p) const { std::free(p); }

GemmMeasure::GemmMeasure(hw::ThreadPool& pool) : pool_(pool) { reserve(kRotate); }

void GemmMeasure::reserve(int64_t bytes) {
  if (bytes <= size_) return;
  constexpr int64_t kHuge = 2 << 20;
  size_ = (bytes + kHuge - 1) / kHuge * kHuge;
  memory_.reset(static_cast<char*>(std::aligned_alloc(size_t(kHuge), size_t(size_))));
  MI_CHECK(memory_ != nullptr, "no memory for {} bytes of weights to measure with", size_);
  madvise(memory_.get(), size_t(size_), MADV_HUGEPAGE);
  std::memset(memory_.get(), 0, size_t(size_));
}

double GemmMeasure::seconds(const GemmKernel& kernel, int64_t rows, int64_t all_n, int64_t k, int64_t group, Threads threads) {
  const GemmFormat format = kernel.format;
  const int64_t most = std::max<int64_t>(8 * kNTile, kMostProducts / (rows * k) * pool_.threads() / kNTile * kNTile);
  const int64_t n = rows == 1 ? all_n : std::min(all_n, most);
  const int64_t weights = pad_n(n) / kNTile * gemm_tile_bytes(format, k);
  const int64_t scales = (format == GemmFormat::kI8 ? pad_n(n) * 4 : group ? pad_n(n) * int4_groups(k, group) * 2 : 0) + 64;
  const int64_t bytes = (weights + scales + 63) / 64 * 64;
  const int64_t copies = std::max<int64_t>(1, kRotate / bytes);
  reserve(bytes);
  const auto aligned = [](std::vector<char>& v) { return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(v.data()) + 63) / 64 * 64); };
  const int64_t x_stride = (gemm_takes_q8(format) ? pad_k(k) : pad_k(k) * 4) + 64, y_stride = pad_n(n) * 4;
  const int64_t y_bytes = rows * y_stride;
  std::vector<char> x(size_t(rows * x_stride + 64)), y(size_t(pool_.threads() * y_bytes + 64));
  std::vector<int32_t> colsum(static_cast<size_t>(pad_n(n)));
  char* const base = memory_.get();
  GemmArgs a;
  a.m = rows;
  a.n = n;
  a.k = k;
  a.x = aligned(x);
  a.x_stride = x_stride;
  a.x_scale_offset = pad_k(k);
  a.w_colsum = colsum.data();
  a.group = group;
  a.y = reinterpret_cast<float*>(aligned(y));
  a.y_stride = y_stride;
  const auto weights_at = [&](GemmArgs* to, int64_t i) {
    char* const at = base + i % copies * bytes;
    to->w = at;
    if (group)
      to->w_scale_bf16 = reinterpret_cast<const uint16_t*>(at + weights);
    else
      to->w_scale = reinterpret_cast<const float*>(at + weights);
  };
  // Enough of them that waiting for the last one counts for little.
  const int64_t at_once = threads == Threads::kEach ? 16 * pool_.threads() : 1;
  int64_t next = 0;
  const auto once = [&] {
    if (threads == Threads::kTogether) {
      weights_at(&a, next++);
      return gemm_run(kernel, a, pool_);
    }
    run_tasks(pool_, at_once, [&](int64_t i, int worker) {
      GemmArgs mine = a;
      weights_at(&mine, next + i);
      mine.y = reinterpret_cast<float*>(reinterpret_cast<char*>(a.y) + worker * y_bytes);
      gemm_range(kernel, mine, {0, rows, 0, pad_n(n) / kNTile});
    });
    next += at_once;
  };
  double best = 1e30;
  for (int s = 0; s < kSlices; ++s) {
    const auto begin = Clock::now();
    int64_t runs = 0;
    double took = 0;
    do {
      once();
      runs += at_once;
      took = std::chrono::duration<double>(Clock::now() - begin).count();
    } while (took < kSlice);
    best = std::min(best, took / double(runs));
  }
  return best * double(all_n) / double(n);
}

}  // namespace mi::kernels
