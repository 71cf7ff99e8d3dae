// Plans the tasks of one attention call and runs them; the arithmetic is in attention_impl.h.

#include "kernels/attention/attention.h"

#include <xmmintrin.h>

#include <algorithm>
#include <limits>

#include "kernels/attention/block_kernels.h"
#include "kernels/attention/page_view.h"
#include "kernels/rows.h"
#include "kernels/scratch.h"

namespace mi::kernels {
namespace {

using Task = AttentionWorkspace::Task;

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr int64_t kTaskRows = 64;                       // (token, head) rows that share a pass over the keys
constexpr int64_t kTileRows = 16;                       // of a tile of AMX, at most
constexpr int64_t kMaxPartialFloats = int64_t(16) << 20;
constexpr int64_t kSplitBlocks = kSplitTokens / kBlock;

// Walks a row's ascending list of selected blocks while blocks of the cache are visited in ascending order.
struct SelectionCursor {
  const int32_t* ids;
  int64_t left;
  uint64_t mask(int64_t select_block, int64_t b) {
    const int64_t begin = b * kBlock, end = begin + kBlock;
    while (left > 0 && *ids >= 0 && (*ids + 1) * select_block <= begin) ++ids, --left;
    uint64_t m = 0;
    for (int64_t i = 0; i < left && ids[i] >= 0 && ids[i] * select_block < end; ++i)
      m |= bit_range(std::max(ids[i] * select_block, begin) - begin, std::min((ids[i] + 1) * select_block, end) - begin);
    return m;
  }
};

// Denormals are zeros meanwhile, if `on`.
class FlushDenormals {
 public:
  explicit FlushDenormals(bool on) : before_(_mm_getcsr()) {
    if (on) _mm_setcsr(before_ | 0x8040);     // flush to zero, denormals are zeros
  }
  ~FlushDenormals() { _mm_setcsr(before_); }
  FlushDenormals(const FlushDenormals&) = delete;

 private:
  const unsigned before_;
};

// Tiles of this height are configured meanwhile, if any: once a task, as it costs some hundred cycles.
class Tiles {
 public:
  explicit Tiles(int64_t height) : on_(height > 0) {
#if !defined(MI_SCALAR_ONLY)
    if (on_) amx::attn_begin(height);
#endif
  }
  ~Tiles() {
#if !defined(MI_SCALAR_ONLY)
    if (on_) amx::attn_end();
#endif
  }
  Tiles(const Tiles&) = delete;

 private:
  const bool on_;
};

class AttentionCall {
 public:
  AttentionCall(const AttentionParams& p, const AttentionArgs& a, AttentionWorkspace& ws, const hw::CpuFeatures& cpu)
      : p_(p), a_(a), cache_(*a.cache), ws_(ws), cpu_(cpu), group_(p.heads / p.kv_heads), v_pad_(a.cache->v_pad()),
        rounds_(a.order != SumOrder::kAscending), bf16_(attention_uses_bf16(a.order, cpu)), amx_(bf16_ && a.order == SumOrder::kTiles),
        q_cols_(amx_ ? (a.cache->k_rows() + 31) / 32 * 32 : a.cache->k_rows()) {
    MI_CHECK(rounds_ == (cache_.kind == KvKind::kBF16), "this cache is not added in this order");
  }

  void run(hw::ThreadPool& pool) {
    plan(pool.threads());
    run_tasks(pool, int64_t(ws_.tasks.size()), [&](int64_t i, int) { compute(ws_.tasks[size_t(i)]); });
    run_tasks(pool, int64_t(ws_.merges.size()), [&](int64_t i, int) { merge(ws_.merges[size_t(i)]); });
  }

 private:
  // Memory of one task on its thread.
  struct Scratch {
    float *q, *keys, *values, *acc, *part, *sinks;
    uint16_t *q_bf16, *tiles;
    uint64_t* masks;
    float** out_rows;
    SelectionCursor* cursors;
  };
  Scratch scratch(int64_t tokens) const {
    const int64_t rows = padded_rows(tokens);
    Scratch s{};
    carve_scratch([&](ScratchCarver& c) {
      if (bf16_) {
        s.q_bf16 = c.take<uint16_t>(rows * q_cols_);
        if (amx_) s.tiles = c.take<uint16_t>(tile_scratch_bytes() / 2);
      } else {
        s.q = c.take<float>(rows * cache_.k_rows());
        s.keys = c.take<float>(kBlock * cache_.k_rows());
        s.values = c.take<float>(kBlock * v_pad_);
      }
      s.acc = c.take<float>(state_floats(rows));
      s.part = c.take<float>(state_floats(rows));
      s.sinks = c.take<float>(rows);
      s.masks = c.take<uint64_t>(rows);
      s.out_rows = c.take<float*>(rows);
      s.cursors = c.take<SelectionCursor>(tokens);
    });
    return s;
  }

  int64_t tile_scratch_bytes() const {
#if defined(MI_SCALAR_ONLY)
    return 0;
#else
    return amx::attn_scratch_bytes(v_pad_);
#endif
  }
  // Rows of the state: tiles of rows are of one height and full, with rows that see nothing.
  int64_t padded_rows(int64_t tokens) const {
    const int64_t rows = tokens * group_;
    return amx_ ? (rows + tile_height(rows) - 1) / tile_height(rows) * tile_height(rows) : rows;
  }
  static int64_t tile_height(int64_t rows) {
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    return (rows + tiles - 1) / tiles;
  }
  int64_t state_floats(int64_t rows) const { return (rows * (v_pad_ + 2) + 15) / 16 * 16; }
  SoftmaxState state(float* at, int64_t rows) const { return {at + rows * v_pad_, at + rows * (v_pad_ + 1), at}; }
  void reset(const SoftmaxState& s, int64_t rows) const {
    std::fill_n(s.m, rows, kNegInf);
    std::fill_n(s.l, rows, 0.0f);
    std::fill_n(s.o, rows * v_pad_, 0.0f);
  }

  const KvChunk& chunk(const Task& t) const { return a_.step->chunks[size_t(t.chunk)]; }

  // One task per (tokens, KV head). When these are too few to keep the threads busy, long ones are cut into splits, whose
  // partial results a second round folds in the order that one task would have used.
  void plan(int threads) {
    ws_.tasks.clear();
    ws_.merges.clear();
    const int64_t task_tokens = std::max<int64_t>(1, kTaskRows / group_);
    int64_t whole = 0;
    for (const KvChunk& c : a_.step->chunks) whole += (c.rows + task_tokens - 1) / task_tokens * p_.kv_heads;
    const bool cut = threads > 1 && whole < 4 * threads;
    int64_t partials = 0;
    for (size_t ci = 0; ci < a_.step->chunks.size(); ++ci) {
      const KvChunk& c = a_.step->chunks[ci];
      // A head's tasks one after the other: its keys and values stay in the L2 cache. Later tokens see more of them: the
      // longest tasks first.
      for (int32_t head = 0; head < p_.kv_heads; ++head)
        for (int64_t end = c.rows; end > 0; end -= task_tokens) {
          const int64_t token = std::max<int64_t>(0, end - task_tokens);
          Task t;
          t.chunk = int32_t(ci);
          t.token = int32_t(token);
          t.tokens = int32_t(end - token);
          t.kv_head = head;
          t.split_begin = int32_t(first_seen(c.start + token, p_.window) / kSplitTokens);
          t.split_end = int32_t((c.start + end - 1) / kSplitTokens + 1);
          const int64_t splits = t.split_end - t.split_begin, part_floats = state_floats(padded_rows(t.tokens));
          if (!cut || splits == 1 || partials + splits * part_floats > kMaxPartialFloats) {
            ws_.tasks.push_back(t);
            continue;
          }
          t.partial = partials;
          ws_.merges.push_back(t);
          for (Task part = t; part.split_begin < t.split_end; ++part.split_begin) {
            part.split_end = part.split_begin + 1;
            part.partial = partials;
            ws_.tasks.push_back(part);
            partials += part_floats;
          }
        }
    }
    if (int64_t(ws_.partials.size()) < partials) ws_.partials.resize(size_t(partials));
  }

  void compute(const Task& t) const {
    const FlushDenormals flush(rounds_);
    const Tiles tiles(amx_ ? tile_height(t.tokens * group_) : 0);
    const KvChunk& c = chunk(t);
    const Scratch s = scratch(t.tokens);
    const int64_t rows = padded_rows(t.tokens), head = t.kv_head * group_;
    for (int64_t i = 0; i < t.tokens; ++i) {
      const int64_t row = c.row + t.token + i;
      const float* q = row_at(a_.q, a_.q_stride, row) + head * p_.k_dim;
      if (rounds_)
        for (int64_t h = 0; h < group_; ++h) {
          const int64_t at = (i * group_ + h) * q_cols_;
          MI_PICK(attn_round_row, cpu_)(q + h * p_.k_dim, p_.k_dim, cache_.k_rows(), s.q ? s.q + at : nullptr, s.q_bf16 ? s.q_bf16 + at : nullptr);
          if (amx_) std::fill_n(s.q_bf16 + at + cache_.k_rows(), q_cols_ - cache_.k_rows(), uint16_t(0));
        }
      else
        std::copy_n(q, group_ * p_.k_dim, s.q + i * group_ * p_.k_dim);
      if (a_.selection) s.cursors[i] = {row_at(a_.selection, a_.selection_stride, row) + t.kv_head * a_.topk, a_.topk};
    }
    for (int64_t r = t.tokens * group_; r < rows; ++r) {
      s.masks[r] = 0;
      std::fill_n(s.q_bf16 + r * q_cols_, q_cols_, uint16_t(0));
    }
    if (t.partial >= 0) return run_split(t, s, t.split_begin, state(ws_.partials.data() + t.partial, rows));
    const SoftmaxState acc = state(s.acc, rows), part = state(s.part, rows);
    run_split(t, s, t.split_begin, acc);
    for (int64_t split = t.split_begin + 1; split < t.split_end; ++split) {
      run_split(t, s, split, part);
      MI_PICK(attn_fold, cpu_)(rows, v_pad_, acc, part);
    }
    finish(t, s, acc);
  }

  void merge(const Task& t) const {
    const FlushDenormals flush(rounds_);
    const Scratch s = scratch(t.tokens);
    const int64_t rows = padded_rows(t.tokens);
    float* at = ws_.partials.data() + t.partial;
    const SoftmaxState acc = state(at, rows);
    for (int64_t split = t.split_begin + 1; split < t.split_end; ++split) {
      at += state_floats(rows);
      MI_PICK(attn_fold, cpu_)(rows, v_pad_, acc, state(at, rows));
    }
    finish(t, s, acc);
  }

  void run_split(const Task& t, const Scratch& s, int64_t split, const SoftmaxState& out) const {
    const KvChunk& c = chunk(t);
    const int64_t first = c.start + t.token, last = first + t.tokens - 1;
    reset(out, padded_rows(t.tokens));
    const int64_t begin = std::max(split * kSplitBlocks, first_seen(first, p_.window) / kBlock);
    const int64_t end = std::min((split + 1) * kSplitBlocks, last / kBlock + 1);
    for (int64_t b = begin; b < end; ++b) {
      uint64_t any = 0;
      for (int64_t i = 0; i < t.tokens; ++i) {
        uint64_t m = seen_mask(first + i, p_.window, b);
        if (a_.selection && m) m &= s.cursors[i].mask(p_.select_block, b);
        std::fill_n(s.masks + i * group_, group_, m);
        any |= m;
      }
      if (any == 0) continue;
      const int64_t n = (kBlock - __builtin_clzll(any) + 15) / 16 * 16;
      BlockArgs args{};
      args.rows = padded_rows(t.tokens);
      args.dim = cache_.k_rows();
      args.order = a_.order;
      args.v_pad = v_pad_;
      args.masks = s.masks;
      args.scale = p_.scale;
      args.softcap = p_.softcap;
      args.state = out;
#if !defined(MI_SCALAR_ONLY)
      if (bf16_) {
        args.q_bf16 = s.q_bf16;
        args.keys_bf16 = reinterpret_cast<const uint16_t*>(cache_.keys(c.pages[b], t.kv_head));
        args.values_bf16 = reinterpret_cast<const uint16_t*>(cache_.values(c.pages[b], t.kv_head));
        if (amx_) {
          args.height = tile_height(t.tokens * group_);
          args.filled = std::min(c.start + c.rows - b * kBlock, kBlock);
          args.scratch = s.tiles;
          amx::attn_block(args);
        } else {
          avx512bf16::attn_block(args);
        }
        continue;
      }
#endif
      args.q = s.q;
      args.keys = view_keys(cache_, c.pages[b], t.kv_head, n, s.keys, cpu_);
      args.values = view_values(cache_, c.pages[b], t.kv_head, n, s.values, cpu_);
      MI_PICK(attn_block, cpu_)(args);
    }
  }

  void finish(const Task& t, const Scratch& s, const SoftmaxState& acc) const {
    const KvChunk& c = chunk(t);
    const int64_t head = t.kv_head * group_;
    for (int64_t i = 0; i < t.tokens; ++i) {
      float* o = row_at(a_.o, a_.o_stride, c.row + t.token + i) + head * p_.v_dim;
      for (int64_t h = 0; h < group_; ++h) {
        s.out_rows[i * group_ + h] = o + h * p_.v_dim;
        if (a_.sinks) s.sinks[i * group_ + h] = a_.sinks[head + h];
      }
    }
    MI_PICK(attn_finish, cpu_)(t.tokens * group_, p_.v_dim, v_pad_, acc, a_.sinks ? s.sinks : nullptr, s.out_rows);
  }

  const AttentionParams& p_;
  const AttentionArgs& a_;
  const KvCache& cache_;
  AttentionWorkspace& ws_;
  const hw::CpuFeatures& cpu_;
  const int64_t group_;      // heads per KV head
  const int64_t v_pad_;
  const bool rounds_;        // the cache is bfloat16: attention.h
  const bool bf16_;          // bfloat16 is multiplied as it is
  const bool amx_;
  const int64_t q_cols_;
};

}  // namespace

bool attention_uses_bf16(SumOrder order, const hw::CpuFeatures& cpu) {
#if defined(MI_SCALAR_ONLY)
  static_cast<void>(order), static_cast<void>(cpu);
  return false;
#else
  if (order == SumOrder::kAscending || !cpu.avx512 || !cpu.avx512_bf16) return false;
  if (order == SumOrder::kPairs) {
    static const bool as_promised = avx512bf16::dot_is_two_fma();
    return as_promised;
  }
  if (!cpu.amx_bf16) return false;
  static const bool as_promised = amx::dot_is_two_chains();
  return as_promised;
#endif
}

const char* sum_order_name(SumOrder order) {
  return order == SumOrder::kAscending ? "ascending" : order == SumOrder::kPairs ? "pairs" : "tiles";
}

SumOrder attention_order(KvKind kind, std::optional<SumOrder> asked, const hw::CpuFeatures& cpu) {
  if (kind != KvKind::kBF16) return SumOrder::kAscending;
  if (asked) return *asked;
  return attention_uses_bf16(SumOrder::kTiles, cpu) ? SumOrder::kTiles : SumOrder::kPairs;
}

void attention_run(const AttentionParams& p, const AttentionArgs& a, AttentionWorkspace& ws, hw::ThreadPool& pool,
                   const hw::CpuFeatures& cpu) {
  AttentionCall(p, a, ws, cpu).run(pool);
}

}  // namespace mi::kernels
