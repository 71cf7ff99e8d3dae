#include "kernels/moe/grouped.h"

#include <algorithm>

#include "base/check.h"
#include "kernels/dispatch.h"
#include "kernels/moe/kinds.h"
#include "kernels/moe/plan.h"
#include "kernels/quantize/quantize.h"
#include "kernels/rows.h"
#include "tensor/int4.h"

MI_KERNEL(void, activation_impl, (const ActArgs& a))

namespace mi::kernels {
namespace {

constexpr int64_t round64(int64_t v) { return (v + 63) / 64 * 64; }

// Of a product of gate or of up before the activation takes both: they stay in the L2 cache, through which weights pass.
// 128 rows on average by 768 columns on a Xeon: the experts' time is 9 % less than with all columns at once.
constexpr int64_t kChunkFloats = 128 * 128;

int64_t tile_bytes(const ExpertWeights& w) { return gemm_tile_bytes(w.format, w.k); }

// The product of the task's rows with its columns of expert e's weights, as columns [0, ..) of a matrix of their own;
// x, y and their rows are for the caller to fill in.
GemmArgs part_of(const ExpertWeights& w, const ExpertTask& task) {
  const int64_t e = task.expert, col = task.tile_begin * kNTile;
  GemmArgs g;
  g.m = task.rows;
  g.n = std::min(w.n, task.tile_end * kNTile) - col;
  g.k = w.k;
  const ExpertPlace& place = w.places[e];
  g.w = static_cast<const char*>(place.w) + task.tile_begin * tile_bytes(w);
  if (w.format == GemmFormat::kI8) {
    g.w_scale = w.scale + e * pad_n(w.n) + col;
    g.w_colsum = w.colsum + e * pad_n(w.n) + col;
  }
  if (w.format == GemmFormat::kI4) {
    const int64_t at = col * int4_groups(w.k, w.group);
    g.w_scale = place.scale ? place.scale + at : nullptr;
    g.w_scale_bf16 = place.scale_bf16 ? place.scale_bf16 + at : nullptr;
    g.group = w.group;
  }
  if (w.bias) g.bias = w.bias + e * w.bias_stride + col;
  return g;
}
GemmRange whole(const ExpertTask& task) { return {0, task.rows, 0, task.tile_end - task.tile_begin}; }

// The first weights of the task that this thread will probably get after task i.
const void* weights_after(std::span<const ExpertTask> tasks, int64_t i, const ExpertWeights& w, int threads) {
  const size_t next = size_t(i + threads);
  return next < tasks.size() ? part_of(w, tasks[next]).w : nullptr;
}

// x_rows: of the sorted pairs; null: x is sorted like them.
void product(const GemmKernel& kernel, const ExpertWeights& w, const ExpertTask& task, const void* w_next,
             const void* x, int64_t x_stride, int64_t x_scale_offset, const int32_t* x_rows, float* y, int64_t y_stride,
             const int32_t* y_rows, bool stream_y) {
  GemmArgs g = part_of(w, task);
  g.w_next = w_next;
  g.x = x_rows ? x : static_cast<const char*>(x) + task.first * x_stride;
  g.x_stride = x_stride;
  g.x_scale_offset = x_scale_offset;
  g.x_rows = x_rows ? x_rows + task.first : nullptr;
  g.y = y + task.tile_begin * kNTile;
  g.y_stride = y_stride;
  g.y_rows = y_rows + task.first;
  g.stream_y = stream_y;
  gemm_range(kernel, g, whole(task));
}

// Where grouped_experts keeps its intermediate rows, one of each per pair.
struct Scratch {
  int64_t h_stride, q_stride, y_stride;  // q: h quantized, sorted like the pairs; none when the down weights are float
  Scratch(int64_t hidden, int64_t inter, GemmFormat down)
      : h_stride(round64(inter * 4)),
        q_stride(gemm_takes_q8(down) ? q8_row_bytes(inter) : 0),
        y_stride(round64(hidden * 4)) {}
  int64_t bytes_per_pair() const { return h_stride + q_stride + y_stride; }
  // Of a step: h, then q, then y.
  char* h(const GroupedExpertsArgs& a) const { return static_cast<char*>(a.scratch); }
  char* q(const GroupedExpertsArgs& a) const { return h(a) + a.tokens * a.route.k * h_stride; }
  float* y(const GroupedExpertsArgs& a) const {
    return reinterpret_cast<float*>(q(a) + a.tokens * a.route.k * q_stride);
  }
};
Scratch scratch_of(const GroupedExpertsArgs& a) { return {a.down.n, a.gate.n, a.down.format}; }

}  // namespace

int64_t grouped_scratch_bytes_per_token(int64_t k, int64_t hidden, int64_t inter, GemmFormat down) {
  return k * Scratch(hidden, inter, down).bytes_per_pair();
}

void expert_linear(const ExpertLinearArgs& a, hw::ThreadPool& pool, const hw::CpuFeatures& cpu) {
  if (a.tokens == 0) return;
  const GemmKernel& kernel = select_gemm(a.w.format, cpu);
  ExpertPlan& plan = ExpertPlan::of_this_thread();
  plan.sort(a.route, a.tokens, a.w.experts, a.only);
  const std::span<const ExpertTask> tasks = plan.split(pad_n(a.w.n) / kNTile, pool.threads());
  const bool stream = gemm_streams(a.y, a.y_stride, a.tokens * a.route.k);
  run_tasks(pool, int64_t(tasks.size()), [&](int64_t i, int) {
    product(kernel, a.w, tasks[size_t(i)], weights_after(tasks, i, a.w, pool.threads()), a.x, a.x_stride,
            a.x_scale_offset, a.x_per_pair ? plan.pairs() : plan.tokens(), a.y, a.y_stride, plan.pairs(), stream);
  });
}

void grouped_experts(const GroupedExpertsArgs& a, hw::ThreadPool& pool, const hw::CpuFeatures& cpu) {
  grouped_products(a, {}, pool, cpu);
  grouped_sum(a, pool, cpu);
}

void grouped_products(const GroupedExpertsArgs& a, std::span<const int32_t> only, hw::ThreadPool& pool,
                      const hw::CpuFeatures& cpu) {
  if (a.tokens == 0) return;
  const int64_t inter = a.gate.n, hidden = a.down.n, pairs = a.tokens * a.route.k;
  MI_DCHECK(a.up.n == inter && a.down.k == inter && a.gate.k == a.up.k, "gate [{}, {}], up [{}, {}], down [{}, {}]",
            a.gate.n, a.gate.k, a.up.n, a.up.k, a.down.n, a.down.k);
  MI_DCHECK(a.gate.format == a.up.format, "gate and up of different formats");
  const Scratch s = scratch_of(a);
  char *const h = s.h(a), *const q = s.q(a);
  float* const y = s.y(a);
  const auto activate = MI_PICK(activation_impl, cpu);
  const GemmKernel& in = select_gemm(a.gate.format, cpu);
  const GemmKernel& out = select_gemm(a.down.format, cpu);
  ExpertPlan& plan = ExpertPlan::of_this_thread();
  plan.sort(a.route, a.tokens, a.gate.experts, only);

  // Gate and up of some rows, chunk of columns by chunk, in this thread's memory, and the activation on them while they
  // are in the cache. Who finishes a block of rows quantizes it: one task, if it has all columns; h then stays here, too.
  auto tasks = plan.split(pad_n(inter) / kNTile, pool.threads());
  run_tasks(pool, int64_t(tasks.size()), [&](int64_t i, int) {
    const ExpertTask& task = tasks[size_t(i)];
    const bool all = s.q_stride > 0 && task.tile_begin == 0 && task.tile_end * kNTile >= inter;
    const int64_t widest = task.tile_end - task.tile_begin;
    const int64_t tiles = std::min(widest, std::max<int64_t>(4, kChunkFloats / (task.rows * kNTile) / 4 * 4));
    const int64_t stride = tiles * kNTile * 4, half = task.rows * stride, gemm_bytes = gemm_scratch_bytes(a.gate.k);
    char* const mine = static_cast<char*>(thread_scratch(gemm_bytes + 2 * half + (all ? task.rows * s.h_stride : 0)));
    char* const here = all ? mine + gemm_bytes + 2 * half : h;
    const int32_t* pairs_here = plan.pairs() + task.first;
    ExpertTask chunk = task;
    for (; chunk.tile_begin < task.tile_end; chunk.tile_begin = chunk.tile_end) {
      chunk.tile_end = int32_t(std::min<int64_t>(chunk.tile_begin + tiles, task.tile_end));
      GemmArgs gate = part_of(a.gate, chunk), up = part_of(a.up, chunk);
      gate.w_next = up.w;
      up.w_next = chunk.tile_end < task.tile_end ? static_cast<const char*>(gate.w) + tiles * tile_bytes(a.gate)
                                                 : weights_after(tasks, i, a.gate, pool.threads());
      up.same_x = a.gate.group == a.up.group;
      gate.same_x = up.same_x && chunk.tile_begin > task.tile_begin;
      for (GemmArgs* g : {&gate, &up}) {
        g->x = a.x;
        g->x_stride = a.x_stride;
        g->x_scale_offset = a.x_scale_offset;
        g->x_rows = plan.tokens() + task.first;
        g->y = reinterpret_cast<float*>(mine + gemm_bytes + (g == &up ? half : 0));
        g->y_stride = stride;
        in.run(*g, whole(chunk), mine);
      }
      ActArgs act{int(a.act.kind), a.act.alpha, a.act.limit, gate.y, up.y, stride, stride, task.rows, gate.n};
      act.h = reinterpret_cast<float*>(here) + chunk.tile_begin * kNTile;
      act.h_stride = s.h_stride;
      act.h_rows = all ? nullptr : pairs_here;
      activate(act);
    }
    if (s.q_stride == 0 || plan.blocks_left(task.row_block).fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    for (int32_t r = 0; r < task.rows; ++r)
      quantize_rows(reinterpret_cast<const float*>(here + (all ? r : pairs_here[r]) * s.h_stride), s.h_stride, 1, inter,
                    q + (task.first + r) * s.q_stride, s.q_stride, cpu, a.h_scale);
  });

  tasks = plan.split(pad_n(hidden) / kNTile, pool.threads());
  const bool stream = gemm_streams(y, s.y_stride, pairs);
  run_tasks(pool, int64_t(tasks.size()), [&](int64_t i, int) {
    product(out, a.down, tasks[size_t(i)], weights_after(tasks, i, a.down, pool.threads()), s.q_stride ? q : h,
            s.q_stride ? s.q_stride : s.h_stride, q8_scale_offset(inter), s.q_stride ? nullptr : plan.pairs(), y, s.y_stride,
            plan.pairs(), stream);
  });
}

void grouped_sum(const GroupedExpertsArgs& a, hw::ThreadPool& pool, const hw::CpuFeatures& cpu) {
  const Scratch s = scratch_of(a);
  expert_combine({a.tokens, a.down.n, a.route, s.y(a), s.y_stride, a.residual, a.residual_stride, a.out, a.out_stride},
                 pool, cpu);
}

}  // namespace mi::kernels
