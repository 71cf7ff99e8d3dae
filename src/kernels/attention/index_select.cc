// The block index: scores of all blocks for a group of rows, then each row's best blocks.

#include <algorithm>
#include <limits>

#include "kernels/attention/attention.h"
#include "kernels/attention/page_view.h"
#include "kernels/rows.h"
#include "kernels/scratch.h"

namespace mi::kernels {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kSelectTaskRows = 64;                        // (token, head) rows that share a pass over the keys
constexpr int64_t kMaxScoreFloats = int64_t(8) << 20;          // of all rows that are scored before their choice is made

// Tokens [token, token + tokens) of a chunk.
struct Rows {
  const KvChunk* chunk;
  int64_t token, tokens;
  int64_t first() const { return chunk->start + token; }
  int64_t last() const { return first() + tokens - 1; }
};

class IndexSelectCall {
 public:
  IndexSelectCall(const IndexSelectParams& p, const IndexSelectArgs& a, AttentionWorkspace& ws, const hw::CpuFeatures& cpu)
      : p_(p), a_(a), ws_(ws), cpu_(cpu), split_tokens_(kSplitTokens % p.block == 0 ? kSplitTokens : int64_t(1) << 40) {}

  void run(hw::ThreadPool& pool) {
    for (const KvChunk& c : a_.step->chunks) {
      for (int64_t token = 0; token < c.rows;) {
        Rows g{&c, token, c.rows - token};
        stride_ = g.last() / p_.block + 1;
        if (stride_ <= p_.topk) {        // everything is selected
          for (int64_t i = 0; i < g.tokens; ++i)
            for (int64_t h = 0; h < p_.heads; ++h) list_all(g, i, h);
          break;
        }
        g.tokens = std::clamp<int64_t>(kMaxScoreFloats / (p_.heads * stride_), 1, g.tokens);
        stride_ = g.last() / p_.block + 1;
        run_group(g, pool);
        token += g.tokens;
      }
    }
  }

 private:
  void run_group(const Rows& g, hw::ThreadPool& pool) {
    const int64_t floats = g.tokens * p_.heads * stride_;
    if (int64_t(ws_.block_scores.size()) < floats) ws_.block_scores.resize(size_t(floats));
    const int64_t task_tokens = std::max<int64_t>(1, kSelectTaskRows / p_.heads);
    const int64_t parts = (g.tokens + task_tokens - 1) / task_tokens, splits = g.last() / split_tokens_ + 1;
    run_tasks(pool, parts * splits, [&](int64_t i, int) {
      const int64_t at = i / splits * task_tokens;
      score(g, {g.chunk, g.token + at, std::min(task_tokens, g.tokens - at)}, i % splits);
    });
    run_tasks(pool, parts, [&](int64_t i, int) {
      for (int64_t t = i * task_tokens; t < std::min(g.tokens, (i + 1) * task_tokens); ++t)
        for (int64_t h = 0; h < p_.heads; ++h) choose(g, t, h);
    });
  }

  float* scores(int64_t token_in_group) const { return ws_.block_scores.data() + token_in_group * p_.heads * stride_; }
  int32_t* selection(const Rows& g, int64_t i, int64_t head) const {
    return row_at(a_.selection, a_.selection_stride, g.chunk->row + g.token + i) + head * p_.topk;
  }

  // Block scores of rows r within one split of the context.
  void score(const Rows& g, const Rows& r, int64_t split) const {
    const int64_t rows = r.tokens * p_.heads;
    float *q, *keys;
    uint64_t* masks;
    carve_scratch([&](ScratchCarver& c) {
      q = c.take<float>(rows * p_.dim);
      keys = c.take<float>(kBlock * p_.dim);
      masks = c.take<uint64_t>(rows);
    });
    for (int64_t i = 0; i < r.tokens; ++i)
      std::copy_n(row_at(a_.q, a_.q_stride, r.chunk->row + r.token + i), p_.heads * p_.dim, q + i * p_.heads * p_.dim);
    float* best = scores(r.token - g.token);
    const int64_t begin = split * split_tokens_, end = std::min(begin + split_tokens_, r.last() + 1);
    if (begin >= end) return;
    for (int64_t i = 0; i < rows; ++i) std::fill(best + i * stride_ + begin / p_.block, best + i * stride_ + (end - 1) / p_.block + 1, -kInf);
    for (int64_t b = begin / kBlock; b * kBlock < end; ++b) {
      for (int64_t i = 0; i < r.tokens; ++i) std::fill_n(masks + i * p_.heads, p_.heads, seen_mask(r.first() + i, 0, b));
      const int64_t n = std::min<int64_t>(kBlock, (end - b * kBlock + 15) / 16 * 16);
      const float* k = view_index_keys(*a_.cache, r.chunk->pages[b], n, keys, cpu_);
      MI_PICK(index_block, cpu_)(rows, q, p_.dim, k, masks, b * kBlock, p_.block, best + b * kBlock / p_.block, stride_);
    }
  }

  void list_all(const Rows& g, int64_t i, int64_t head) const {
    int32_t* out = selection(g, i, head);
    const int64_t blocks = (g.first() + i) / p_.block + 1;
    for (int64_t j = 0; j < p_.topk; ++j) out[j] = j < blocks ? int32_t(j) : -1;
  }

  void choose(const Rows& g, int64_t i, int64_t head) const {
    const int64_t blocks = (g.first() + i) / p_.block + 1;
    if (blocks <= p_.topk) return list_all(g, i, head);
    float* s = scores(i) + head * stride_;
    for (int64_t b = std::max<int64_t>(0, blocks - p_.local); b < blocks; ++b) s[b] = kInf;
    int32_t* ids = static_cast<int32_t*>(thread_scratch(blocks * 4));
    for (int64_t b = 0; b < blocks; ++b) ids[b] = int32_t(b);
    const auto better = [s](int32_t x, int32_t y) { return s[x] > s[y] || (s[x] == s[y] && x < y); };
    std::nth_element(ids, ids + p_.topk - 1, ids + blocks, better);
    std::sort(ids, ids + p_.topk);
    std::copy_n(ids, p_.topk, selection(g, i, head));
  }

  const IndexSelectParams& p_;
  const IndexSelectArgs& a_;
  AttentionWorkspace& ws_;
  const hw::CpuFeatures& cpu_;
  const int64_t split_tokens_;   // whole blocks lie in one split
  int64_t stride_ = 0;           // blocks in a row of scores
};

}  // namespace

void index_select_run(const IndexSelectParams& p, const IndexSelectArgs& a, AttentionWorkspace& ws, hw::ThreadPool& pool,
                      const hw::CpuFeatures& cpu) {
  IndexSelectCall(p, a, ws, cpu).run(pool);
}

}  // namespace mi::kernels
