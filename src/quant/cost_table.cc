#include "quant/cost_table.h"

#include <algorithm>
#include <chrono>

#include "kernels/gemm/gemm.h"
#include "kernels/scratch.h"
#include "tensor/int4.h"

namespace mi::quant {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kRotate = int64_t(256) << 20;  // more than the caches hold
constexpr double kSlice = 0.006;                 // seconds of one measurement; the fastest of kSlices counts
constexpr int kSlices = 5;

kernels::GemmFormat gemm_format(LayerFormat f, DType float_type) {
  if (f == LayerFormat::kFloat) return float_type == DType::kF32 ? kernels::GemmFormat::kF32 : kernels::GemmFormat::kBF16;
  return f == LayerFormat::kInt8 ? kernels::GemmFormat::kI8 : kernels::GemmFormat::kI4;
}

class Bench {
 public:
  explicit Bench(hw::ThreadPool& pool) : pool_(pool), memory_(size_t(kRotate + 4096)) {}

  double seconds(int64_t n, int64_t k, LayerFormat f, DType float_type) {
    const kernels::GemmFormat format = gemm_format(f, float_type);
    const int64_t tiles = kernels::pad_n(n) / kernels::kNTile, group = group_of(f);
    const int64_t weights = tiles * kernels::gemm_tile_bytes(format, k);
    const int64_t scales = (f == LayerFormat::kInt8 ? kernels::pad_n(n) * 4
                            : group                 ? kernels::pad_n(n) * int4_groups(k, group) * 2
                                                    : 0) + 64;
    const int64_t bytes = (weights + scales + 63) / 64 * 64;
    const int64_t copies = std::max<int64_t>(1, kRotate / bytes);
    if (copies == 1 && bytes > kRotate) memory_.resize(size_t(bytes + 4096));
    std::vector<float> x(size_t(kernels::pad_k(k)) + 64), y(static_cast<size_t>(kernels::pad_n(n)));
    std::vector<int32_t> colsum(static_cast<size_t>(kernels::pad_n(n)));
    char* const base = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory_.data()) + 63) / 64 * 64);
    kernels::GemmArgs a;
    a.m = 1;
    a.n = n;
    a.k = k;
    a.x = x.data();
    a.x_stride = int64_t(x.size()) * 4;
    a.x_scale_offset = kernels::pad_k(k);
    a.w_colsum = colsum.data();
    a.group = group;
    a.y = y.data();
    a.y_stride = n * 4;
    const kernels::GemmKernel& kernel = kernels::select_gemm(format);
    int64_t next = 0;
    const auto once = [&] {
      char* const at = base + next++ % copies * bytes;
      a.w = at;
      if (group)
        a.w_scale_bf16 = reinterpret_cast<const uint16_t*>(at + weights);
      else
        a.w_scale = reinterpret_cast<const float*>(at + weights);
      kernels::gemm_run(kernel, a, pool_);
    };
    double best = 1e30;
    for (int s = 0; s < kSlices; ++s) {
      const auto begin = Clock::now();
      int64_t runs = 0;
      double took = 0;
      do {
        once();
        ++runs;
        took = std::chrono::duration<double>(Clock::now() - begin).count();
      } while (took < kSlice);
      best = std::min(best, took / double(runs));
    }
    return best;
  }

 private:
  hw::ThreadPool& pool_;
  std::vector<char> memory_;
};

}  // namespace

CostTable CostTable::measure(const std::vector<Unit>& units, const std::vector<LayerFormat>& formats, DType float_type,
                             hw::ThreadPool& pool) {
  CostTable t;
  Bench bench(pool);
  for (const Unit& u : units)
    for (const UnitMatrix& m : u.matrices)
      for (LayerFormat f : formats)
        if (const auto key = std::tuple(m.n, m.k, f); !t.seconds_.count(key))
          t.seconds_[key] = bench.seconds(m.n, m.k, f, float_type);
  return t;
}

double CostTable::seconds(const Unit& u, LayerFormat f) const {
  double sum = 0;
  for (const UnitMatrix& m : u.matrices) sum += m.active * seconds_.at({m.n, m.k, f});
  return sum;
}

}  // namespace mi::quant
