#include "kernels/gemm/measure.h"

#include <algorithm>
#include <chrono>

#include "tensor/int4.h"

namespace mi::kernels {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kRotate = int64_t(256) << 20;  // more than the caches hold
constexpr double kSlice = 0.006;                 // seconds of one measurement; the fastest of kSlices counts
constexpr int kSlices = 5;
constexpr int64_t kMostProducts = int64_t(1) << 26;  // of one thread in one measured product: the reference takes 0.1 s

}  // namespace

GemmMeasure::GemmMeasure(hw::ThreadPool& pool) : pool_(pool), memory_(size_t(kRotate + 4096)) {}

double GemmMeasure::seconds(const GemmKernel& kernel, int64_t rows, int64_t all_n, int64_t k, int64_t group) {
  const GemmFormat format = kernel.format;
  const int64_t most = std::max<int64_t>(8 * kNTile, kMostProducts / (rows * k) * pool_.threads() / kNTile * kNTile);
  const int64_t n = rows == 1 ? all_n : std::min(all_n, most);
  const int64_t weights = pad_n(n) / kNTile * gemm_tile_bytes(format, k);
  const int64_t scales = (format == GemmFormat::kI8 ? pad_n(n) * 4 : group ? pad_n(n) * int4_groups(k, group) * 2 : 0) + 64;
  const int64_t bytes = (weights + scales + 63) / 64 * 64;
  const int64_t copies = std::max<int64_t>(1, kRotate / bytes);
  if (bytes > kRotate) memory_.resize(size_t(bytes + 4096));
  const auto aligned = [](std::vector<char>& v) { return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(v.data()) + 63) / 64 * 64); };
  const int64_t x_stride = (gemm_takes_q8(format) ? pad_k(k) : pad_k(k) * 4) + 64, y_stride = pad_n(n) * 4;
  std::vector<char> x(size_t(rows * x_stride + 64)), y(size_t(rows * y_stride + 64));
  std::vector<int32_t> colsum(static_cast<size_t>(pad_n(n)));
  char* const base = aligned(memory_);
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
  int64_t next = 0;
  double best = 1e30;
  for (int s = 0; s < kSlices; ++s) {
    const auto begin = Clock::now();
    int64_t runs = 0;
    double took = 0;
    do {
      char* const at = base + next++ % copies * bytes;
      a.w = at;
      if (group)
        a.w_scale_bf16 = reinterpret_cast<const uint16_t*>(at + weights);
      else
        a.w_scale = reinterpret_cast<const float*>(at + weights);
      gemm_run(kernel, a, pool_);
      ++runs;
      took = std::chrono::duration<double>(Clock::now() - begin).count();
    } while (took < kSlice);
    best = std::min(best, took / double(runs));
  }
  return best * double(all_n) / double(n);
}

}  // namespace mi::kernels
