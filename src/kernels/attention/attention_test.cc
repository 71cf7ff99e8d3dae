#include "kernels/attention/attention.h"

#include <algorithm>
#include <numeric>

#include "kernels/quantize/quantize.h"
#include "kernels/testing.h"
#include "tensor/dtype.h"

namespace mi::kernels {
namespace {

// float_builds(), and the one that multiplies tiles.
std::vector<hw::CpuFeatures> attention_builds() {
  std::vector<hw::CpuFeatures> all = float_builds();
  if (hw::detect_cpu().amx_bf16) {
    all.push_back(all.back());
    all.back().amx_bf16 = true;
  }
  return all;
}

std::vector<SumOrder> orders(KvKind kind) {
  if (kind == KvKind::kBF16) return {SumOrder::kPairs, SumOrder::kTiles};
  return {SumOrder::kAscending};
}

// A layer's cache and one or more sequences in it, with all keys, values and queries known.
struct World {
  AttentionParams p;
  KvCache cache;
  SumOrder order;
  std::vector<std::byte> memory;
  struct Sequence {
    Matrix q, k, v;
    std::vector<int32_t> pages;
  };
  std::vector<Sequence> sequences;
  std::vector<float> sinks;
  int64_t topk = 0;
  std::vector<std::vector<int32_t>> selection;   // per sequence [tokens, kv_heads * topk]

  World(const AttentionParams& params, KvKind kind, const std::vector<int64_t>& lengths) : p(params), order(orders(kind)[0]) {
    cache.kind = kind;
    cache.kv_heads = p.kv_heads;
    cache.k_dim = p.k_dim;
    cache.v_dim = p.v_dim;
    int64_t pages = 3;
    for (int64_t n : lengths) pages += (n + 63) / 64;
    memory.resize(size_t(pages * cache.page_bytes() + 64), std::byte{0x7f});     // int8 127, floats near the largest
    cache.data = reinterpret_cast<std::byte*>((uintptr_t(memory.data()) + 63) / 64 * 64);
    int32_t next = int32_t(pages);     // pages of a sequence are neither in order nor neighbours
    for (size_t i = 0; i < lengths.size(); ++i) {
      Sequence s{Matrix(lengths[i], p.heads * p.k_dim, 10 * i + 1, 1.0f), Matrix(lengths[i], p.kv_heads * p.k_dim, 10 * i + 2, 1.0f),
                 Matrix(lengths[i], p.kv_heads * p.v_dim, 10 * i + 3, 1.0f), {}};
      for (int64_t n = 0; n < lengths[i]; n += 64) s.pages.push_back(--next);
      std::rotate(s.pages.begin(), s.pages.begin() + long(s.pages.size() / 2), s.pages.end());
      sequences.push_back(std::move(s));
    }
  }

  struct Part { size_t sequence; int64_t start, rows; };
  // One step over these parts; the rows of o go to the sequences' outputs.
  void step(const std::vector<Part>& parts, std::vector<Matrix>& out, AttentionWorkspace& ws, hw::ThreadPool& pool, const hw::CpuFeatures& cpu) {
    int64_t rows = 0;
    for (const Part& x : parts) rows += x.rows;
    Matrix q(rows, p.heads * p.k_dim), k(rows, p.kv_heads * p.k_dim), v(rows, p.kv_heads * p.v_dim), o(rows, p.heads * p.v_dim);
    std::vector<int32_t> chosen;
    KvStep s;
    int64_t row = 0;
    for (const Part& x : parts) {
      const Sequence& seq = sequences[x.sequence];
      s.add({row, x.rows, x.start, seq.pages.data()});
      for (int64_t i = 0; i < x.rows; ++i, ++row) {
        std::copy_n(seq.q.row(x.start + i), q.cols, q.row(row));
        std::copy_n(seq.k.row(x.start + i), k.cols, k.row(row));
        std::copy_n(seq.v.row(x.start + i), v.cols, v.row(row));
        if (topk)
          chosen.insert(chosen.end(), selection[x.sequence].begin() + (x.start + i) * p.kv_heads * topk,
                        selection[x.sequence].begin() + (x.start + i + 1) * p.kv_heads * topk);
      }
    }
    kv_append_run({&cache, &s, k.v.data(), k.stride(), v.v.data(), v.stride()}, pool, cpu);
    AttentionArgs a;
    a.cache = &cache;
    a.step = &s;
    a.order = order;
    a.q = q.v.data();
    a.q_stride = q.stride();
    a.sinks = sinks.empty() ? nullptr : sinks.data();
    if (topk) {
      a.selection = chosen.data();
      a.selection_stride = p.kv_heads * topk * 4;
      a.topk = topk;
    }
    a.o = o.v.data();
    a.o_stride = o.stride();
    attention_run(p, a, ws, pool, cpu);
    row = 0;
    for (const Part& x : parts)
      for (int64_t i = 0; i < x.rows; ++i, ++row) std::copy_n(o.row(row), o.width, out[x.sequence].row(x.start + i));
  }

  // Every sequence, `chunk` tokens of each per step (0: all), together or one after the other.
  std::vector<Matrix> run(int64_t chunk, bool together, int threads, const hw::CpuFeatures& cpu) {
    hw::ThreadPool pool(threads);
    AttentionWorkspace ws;
    std::vector<Matrix> out;
    int64_t longest = 0;
    for (const Sequence& s : sequences) {
      out.emplace_back(s.q.rows, p.heads * p.v_dim);
      longest = std::max(longest, s.q.rows);
    }
    if (chunk == 0) chunk = longest;
    for (int64_t at = 0; at < longest; at += chunk) {
      std::vector<Part> parts;
      for (size_t i = 0; i < sequences.size(); ++i)
        if (at < sequences[i].q.rows) parts.push_back({i, at, std::min(chunk, sequences[i].q.rows - at)});
      if (together)
        step(parts, out, ws, pool, cpu);
      else
        for (const Part& x : parts) step({x}, out, ws, pool, cpu);
    }
    return out;
  }

  // What the cache makes of a row of floats.
  std::vector<double> stored(const float* x, int64_t n) const {
    std::vector<double> r(static_cast<size_t>(n));
    std::vector<char> q8(size_t(q8_row_bytes(n)));
    std::vector<float> f(x, x + n);
    if (cache.kind == KvKind::kI8) {
      quantize_rows(x, n * 4, 1, n, q8.data(), int64_t(q8.size()), {});
      dequantize_row(q8.data(), n, f.data());
    }
    for (int64_t i = 0; i < n; ++i) r[size_t(i)] = cache.kind == KvKind::kBF16 ? to_f32(to_bf16(x[i])) : f[size_t(i)];
    return r;
  }

  // o_h(t) in double, and a bound of the float result's error.
  void check_row(size_t sequence, int64_t t, int64_t h, const float* o) const {
    const Sequence& s = sequences[sequence];
    const int64_t g = h / (p.heads / p.kv_heads);
    const bool bf16 = cache.kind == KvKind::kBF16;
    std::vector<double> scores;
    std::vector<std::vector<double>> values;
    double products = 0, largest = 0;
    for (int64_t j = 0; j <= t; ++j) {
      if (p.window > 0 && t - j >= p.window) continue;
      if (topk) {
        const int32_t* ids = selection[sequence].data() + (t * p.kv_heads + g) * topk;
        if (std::find(ids, ids + topk, int32_t(j / p.select_block)) == ids + topk) continue;
      }
      const auto key = stored(s.k.row(j) + g * p.k_dim, p.k_dim);
      double dot = 0, size = 0;
      for (int64_t d = 0; d < p.k_dim; ++d) {
        const float x = s.q.at(t, h * p.k_dim + d), q = bf16 ? to_f32(to_bf16(x)) : x;
        dot += double(q) * key[size_t(d)];
        size += std::abs(double(q) * key[size_t(d)]);
      }
      products = std::max(products, size);
      double score = dot * double(p.scale);
      if (p.softcap > 0) score = p.softcap * std::tanh(score / p.softcap);
      scores.push_back(score);
      values.push_back(stored(s.v.row(j) + g * p.v_dim, p.v_dim));
      for (double v : values.back()) largest = std::max(largest, std::abs(v));
    }
    double top = sinks.empty() ? -INFINITY : sinks[size_t(h)];
    for (double x : scores) top = std::max(top, x);
    double sum = sinks.empty() ? 0 : std::exp(sinks[size_t(h)] - top);
    for (double x : scores) sum += std::exp(x - top);
    // A score is off by its dot's roundings; every weight by that, the error of exp (twice: block and fold) and the roundings of sums.
    const double score_error = products * double(p.scale) * double(p.k_dim + 2) * kUlp + (p.softcap > 0 ? p.softcap * 1e-6 : 0);
    // With a bfloat16 cache each weight is rounded to 8 bits.
    const double tolerance = largest * (2 * score_error + 1e-6 + double(scores.size() + 64) * kUlp + (bf16 ? 1.0 / 512 : 0));
    for (int64_t d = 0; d < p.v_dim; ++d) {
      double exact = 0;
      for (size_t j = 0; j < scores.size(); ++j) exact += std::exp(scores[j] - top) / sum * values[j][size_t(d)];
      ASSERT_NEAR(o[d], exact, tolerance) << "sequence " << sequence << " token " << t << " head " << h << " dim " << d;
    }
  }
};

AttentionParams params(int64_t heads, int64_t kv_heads, int64_t k_dim, int64_t v_dim) {
  AttentionParams p;
  p.heads = heads;
  p.kv_heads = kv_heads;
  p.k_dim = k_dim;
  p.v_dim = v_dim;
  p.scale = float(1 / std::sqrt(double(k_dim)));
  return p;
}

std::vector<World> worlds() {
  std::vector<World> all;
  all.emplace_back(params(4, 2, 16, 16), KvKind::kF32, std::vector<int64_t>{150, 1, 64, 70});
  all.emplace_back(params(6, 2, 20, 12), KvKind::kBF16, std::vector<int64_t>{100, 33});
  all.emplace_back(params(8, 2, 128, 128), KvKind::kBF16, std::vector<int64_t>{130, 5});
  all.emplace_back(params(5, 1, 13, 80), KvKind::kBF16, std::vector<int64_t>{71});      // an odd last dimension
  all.emplace_back(params(3, 3, 64, 80), KvKind::kI8, std::vector<int64_t>{90, 65});
  AttentionParams p = params(8, 1, 32, 64);
  p.window = 37;
  all.emplace_back(p, KvKind::kF32, std::vector<int64_t>{200, 40});
  all.back().sinks = {0.5f, -1, 3, 0, 10, -20, 1, 2};
  p.window = 21;
  all.emplace_back(p, KvKind::kBF16, std::vector<int64_t>{150, 9});
  p = params(2, 1, 24, 16);
  p.softcap = 2;
  all.emplace_back(p, KvKind::kBF16, std::vector<int64_t>{80});
  for (int64_t block : {8, 24, 128}) {                            // selections: own block, block 0, and one between
    p = params(4, 2, 16, 16);
    p.select_block = block;
    all.emplace_back(p, KvKind::kF32, std::vector<int64_t>{300, 50});
    World& w = all.back();
    w.topk = 3;
    for (const auto& s : w.sequences) {
      std::vector<int32_t> sel;
      for (int64_t t = 0; t < s.q.rows; ++t)
        for (int64_t g = 0; g < 2; ++g) {
          const int32_t own = int32_t(t / block);
          std::vector<int32_t> ids = {0, own / (2 + int32_t(g)), own};
          std::sort(ids.begin(), ids.end());
          ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
          ids.resize(3, -1);
          sel.insert(sel.end(), ids.begin(), ids.end());
        }
      w.selection.push_back(sel);
    }
  }
  return all;
}

// Every world in every order of its cache.
template <typename F>
void for_worlds(F&& f) {
  for (World& w : worlds())
    for (SumOrder order : orders(w.cache.kind)) {
      w.order = order;
      f(w);
    }
}

TEST(Attention, WithinTheRoundingOfTheExactResult) {
  for_worlds([](World& w) {
    const auto out = w.run(0, true, 1, hw::detect_cpu());
    for (size_t s = 0; s < out.size(); ++s)
      for (int64_t t = 0; t < out[s].rows; ++t) {
        for (int64_t h = 0; h < w.p.heads; ++h) w.check_row(s, t, h, out[s].row(t) + h * w.p.v_dim);
        ASSERT_EQ(out[s].row(t)[out[s].cols], kGap);
      }
  });
}

TEST(Attention, SameBitsForEveryChunkingBatchThreadCountAndBuild) {
  for_worlds([](World& w) {
    const auto expected = w.run(0, true, 1, {});
    for (const auto& cpu : attention_builds())
      for (int threads : {1, 3})
        for (int64_t chunk : {0, 1, 7, 64})
          for (bool together : {true, false}) {
            if (!cpu.avx2 && (chunk == 1 || threads == 1)) continue;     // the slow build: fewer combinations
            const auto out = w.run(chunk, together, threads, cpu);
            for (size_t s = 0; s < out.size(); ++s)
              expect_same_bits(expected[s], out[s], fmt::format("order {} {} threads {} chunk {} together {}", int(w.order), hw::describe(cpu), threads, chunk, together));
          }
  });
}

TEST(Attention, TilesGiveTheBitsOfFusedMultiplyAdds) {
  hw::CpuFeatures amx = attention_builds().back(), plain = amx;
  if (!attention_uses_bf16(SumOrder::kTiles, amx)) GTEST_SKIP() << "this machine multiplies no tiles of bfloat16";
  plain.amx_bf16 = false;
  struct Shape { int64_t heads, kv_heads, k_dim, v_dim; };
  int variant = 0;
  for (const Shape& x : {Shape{1, 1, 64, 64}, Shape{16, 2, 128, 128}, Shape{7, 1, 80, 80}, Shape{24, 1, 96, 96}, Shape{3, 1, 192, 128}, Shape{20, 2, 256, 256},
                         Shape{65, 1, 34, 48}, Shape{130, 1, 66, 33}, Shape{5, 5, 7, 9}, Shape{33, 1, 128, 144}, Shape{64, 4, 31, 16}})
    for (int64_t rows : {1, 2, 3, 15, 16, 17, 31, 40, 64, 67}) {
      AttentionParams p = params(x.heads, x.kv_heads, x.k_dim, x.v_dim);
      if (++variant % 3 == 1) p.window = 1 + 19 * (variant % 7);
      if (variant % 4 == 1) p.softcap = 3;
      World w(p, KvKind::kBF16, {rows + 29 * (variant % 6)});
      w.order = SumOrder::kTiles;
      World::Sequence& s = w.sequences[0];
      if (variant % 5 == 1)
        for (int64_t h = 0; h < x.heads; ++h) w.sinks.push_back(float(h % 3) - 1);
      if (variant % 4 == 2) {     // blocks of 24, some of them
        w.p.select_block = 24;
        w.topk = 3;
        w.selection.emplace_back();
        for (int64_t t = 0; t < s.q.rows; ++t)
          for (int64_t g = 0; g < x.kv_heads; ++g)
            for (int64_t k = 0; k < 3; ++k) w.selection[0].push_back(k == 0 && t % 5 == 3 ? int32_t(t / 24) : k < 2 && t % 5 != 3 ? int32_t((t / 24 + k) / 2) : -1);
        for (size_t i = 0; i + 1 < w.selection[0].size(); i += 3)
          if (w.selection[0][i] == w.selection[0][i + 1]) w.selection[0][i + 1] = -1;
      }
      std::fill(w.memory.begin(), w.memory.end(), std::byte{0xff});
      std::vector<Matrix> a = {Matrix(s.q.rows, p.heads * p.v_dim)}, b = a;
      hw::ThreadPool pool(1);
      AttentionWorkspace ws;
      for (int64_t at = 0; at < s.q.rows; at += rows) w.step({{0, at, std::min(rows, s.q.rows - at)}}, a, ws, pool, plain);
      std::fill(w.memory.begin(), w.memory.end(), std::byte{0xff});
      for (int64_t at = 0; at < s.q.rows; at += rows) w.step({{0, at, std::min(rows, s.q.rows - at)}}, b, ws, pool, amx);
      expect_same_bits(a[0], b[0], fmt::format("{} heads over {}, {} and {} dimensions, {} of {} rows, window {}, softcap {}", x.heads, x.kv_heads, x.k_dim,
                                               x.v_dim, rows, s.q.rows, p.window, p.softcap));
      if (HasFailure()) return;
      for (float f : a[0].v) ASSERT_FALSE(std::isnan(f));
    }
}

TEST(Attention, TilesAddInAnOrderOfTheirOwn) {
  World w(params(8, 2, 128, 128), KvKind::kBF16, {130});
  const auto pairs = w.run(0, true, 1, hw::detect_cpu());
  w.order = SumOrder::kTiles;
  const auto tiles = w.run(0, true, 1, hw::detect_cpu());
  EXPECT_NE(std::memcmp(pairs[0].row(0), tiles[0].row(0), pairs[0].v.size() * 4), 0);
}

TEST(Attention, TheOrderIsOneForTheCacheAndTheCpu) {
  const hw::CpuFeatures all = attention_builds().back();
  EXPECT_EQ(attention_order(KvKind::kF32, {}, all), SumOrder::kAscending);
  EXPECT_EQ(attention_order(KvKind::kI8, SumOrder::kTiles, all), SumOrder::kAscending);
  EXPECT_EQ(attention_order(KvKind::kBF16, {}, {}), SumOrder::kPairs);
  EXPECT_EQ(attention_order(KvKind::kBF16, SumOrder::kTiles, {}), SumOrder::kTiles);
  EXPECT_EQ(attention_order(KvKind::kBF16, SumOrder::kPairs, all), SumOrder::kPairs);
  EXPECT_EQ(attention_order(KvKind::kBF16, {}, all), attention_uses_bf16(SumOrder::kTiles, all) ? SumOrder::kTiles : SumOrder::kPairs);
}

TEST(KvAppend, RotatesKeysAsRopeDoes) {
  for (const KvKind kind : {KvKind::kF32, KvKind::kBF16, KvKind::kI8})
    for (const bool interleaved : {false, true})
      for (const int64_t rows : {5, 200}) {
        KvCache cache;
        cache.kind = kind;
        cache.kv_heads = 3;
        cache.k_dim = 24;
        cache.v_dim = 20;
        const RopeParams rope{3, 24, 16, interleaved, 1.25f};
        const Matrix k(rows, 72, 1, 1.0f), v(rows, 60, 2, 1.0f);
        Matrix rotated(rows, 72);
        const std::vector<float> freq = {1, 0.5f, 0.3f, 0.1f, 0.05f, 0.01f, 0.003f, 0.001f};
        const RopeTable table = make_rope_table(freq.data(), 16, 1.25f, 300);
        std::vector<int32_t> pages = {4, 1, 3, 0, 2}, positions;
        for (int64_t i = 0; i < rows; ++i) positions.push_back(int32_t(60 + i));
        KvStep s;
        s.add({0, rows, 60, pages.data()});
        hw::ThreadPool pool(2);
        rope_run(rope, {rows, k.v.data(), k.stride(), positions.data(), &table, rotated.v.data(), rotated.stride()}, pool);
        std::vector<std::byte> memory[2];
        for (int fused = 0; fused < 2; ++fused) {
          memory[fused].resize(size_t(5 * cache.page_bytes() + 64), std::byte{1});
          std::byte* const base = reinterpret_cast<std::byte*>((uintptr_t(memory[fused].data()) + 63) / 64 * 64);
          cache.data = base;
          KvAppendArgs a{&cache, &s, fused ? k.v.data() : rotated.v.data(), k.stride(), v.v.data(), v.stride()};
          if (fused) {
            a.rope_table = &table;
            a.rope = rope;
            a.positions = positions.data();
          }
          kv_append_run(a, pool);
          memory[fused] = std::vector<std::byte>(base, base + 5 * cache.page_bytes());
        }
        EXPECT_TRUE(memory[0] == memory[1]) << int(kind) << " " << interleaved << " " << rows;
      }
}

TEST(Attention, LongContextsAreSplitOverThreadsWithoutAnotherBit) {
  AttentionParams p = params(4, 2, 16, 16);
  for (int64_t window : {0, 1500}) {
    p.window = window;
    World w(p, KvKind::kF32, {2500, 1030});
    const auto whole = w.run(512, true, 1, hw::detect_cpu());
    for (int64_t t : {0, 1023, 1024, 1500, 2499})
      for (int64_t h = 0; h < 4; ++h) w.check_row(0, t, h, whole[0].row(t) + h * 16);
    std::vector<Matrix> last = {Matrix(2500, 64), Matrix(1030, 64)};
    for (int threads : {1, 2, 8}) {
      hw::ThreadPool pool(threads);
      AttentionWorkspace ws;
      w.step({{0, 2499, 1}}, last, ws, pool, hw::detect_cpu());
      EXPECT_EQ(ws.merges.size(), threads == 8 || threads == 2 ? 2u : 0u) << "a single decode uses several threads";
      w.step({{1, 1020, 10}}, last, ws, pool, hw::detect_cpu());
      for (int64_t j = 0; j < 64; ++j) {
        ASSERT_EQ(std::memcmp(last[0].row(2499) + j, whole[0].row(2499) + j, 4), 0) << threads << " threads, column " << j;
        for (int64_t t = 1020; t < 1030; ++t) ASSERT_EQ(std::memcmp(last[1].row(t) + j, whole[1].row(t) + j, 4), 0);
      }
    }
  }
}

TEST(Attention, WhatAnotherSequenceLeftInAPageHasNoInfluence) {
  for (KvKind kind : {KvKind::kF32, KvKind::kBF16})
    for (SumOrder order : orders(kind))
      for (const auto& cpu : attention_builds()) {
        World w(params(4, 2, 16, 16), kind, {71});
        w.order = order;
        const auto expected = w.run(0, true, 1, cpu);
        for (float f : expected[0].v) ASSERT_TRUE(std::isfinite(f));
        for (int64_t chunk : {0, 7, 1}) {
          std::fill(w.memory.begin(), w.memory.end(), std::byte{0xff});     // NaN, in both widths
          expect_same_bits(expected[0], w.run(chunk, true, 1, cpu)[0], fmt::format("pages full of NaN before the append, chunk {}", chunk));
        }
      }
}

TEST(Attention, DenormalsOfABfloat16CacheAreZerosInEveryBuild) {
  World w(params(4, 1, 32, 32), KvKind::kBF16, {90});
  for (auto* m : {&w.sequences[0].q, &w.sequences[0].k, &w.sequences[0].v})
    for (int64_t i = 0; i < m->rows; ++i)
      for (int64_t j = 0; j < m->cols; ++j) m->at(i, j) = std::ldexp(m->at(i, j), -115 - int(i + j) % 20);
  for (SumOrder order : orders(KvKind::kBF16)) {
    w.order = order;
    const auto expected = w.run(0, true, 1, {});
    int64_t zeros = 0;
    for (float f : expected[0].v) zeros += f == 0;
    EXPECT_GT(zeros, 20);
    for (const auto& cpu : attention_builds()) expect_same_bits(expected[0], w.run(0, true, 1, cpu)[0], hw::describe(cpu));
  }
}

TEST(Attention, NothingSelectedGivesZeros) {
  World w(params(2, 1, 16, 16), KvKind::kF32, {5});
  w.p.select_block = 8;
  w.topk = 2;
  w.selection = {std::vector<int32_t>(10, -1)};
  const auto out = w.run(0, true, 1, hw::detect_cpu());
  for (int64_t j = 0; j < 32; ++j) ASSERT_EQ(out[0].at(3, j), 0.0f);
}

// ---- block index ----

struct IndexWorld {
  IndexSelectParams p;
  KvCache cache;
  std::vector<std::byte> memory;
  Matrix q, k;
  std::vector<int32_t> pages;

  IndexWorld(const IndexSelectParams& params, int64_t tokens, KvKind kind)
      : p(params), q(tokens, params.heads * params.dim, 31, 1.0f), k(tokens, params.dim, 32, 1.0f) {
    cache.kind = kind;
    cache.kv_heads = 1;
    cache.k_dim = cache.v_dim = 16;
    cache.index_dim = p.dim;
    for (int64_t n = 0; n < tokens; n += 64) pages.insert(pages.begin(), int32_t(n / 64));
    memory.resize(pages.size() * size_t(cache.page_bytes()) + 64, std::byte{0xff});   // NaN
    cache.data = reinterpret_cast<std::byte*>((uintptr_t(memory.data()) + 63) / 64 * 64);
  }
  std::vector<int32_t> run(int64_t chunk, int threads, const hw::CpuFeatures& cpu) {
    hw::ThreadPool pool(threads);
    AttentionWorkspace ws;
    std::vector<int32_t> out(size_t(q.rows * p.heads * p.topk));
    for (int64_t at = 0; at < q.rows; at += chunk) {
      const int64_t n = std::min(chunk, q.rows - at);
      KvStep step;
      step.add({0, n, at, pages.data()});
      index_append_run(cache, step, k.row(at), k.stride(), pool);
      index_select_run(p, {&cache, &step, q.row(at), q.stride(), out.data() + at * p.heads * p.topk, p.heads * p.topk * 4}, ws, pool, cpu);
    }
    return out;
  }
  double key(int64_t j, int64_t d) const { return cache.kind == KvKind::kF32 ? k.at(j, d) : to_f32(to_bf16(k.at(j, d))); }
};

TEST(IndexSelect, ListsTheBestBlocksOfTheContext) {
  for (const IndexSelectParams& p : {IndexSelectParams{2, 16, 8, 4, 1}, IndexSelectParams{3, 20, 128, 2, 1}, IndexSelectParams{1, 32, 24, 5, 2}})
    for (KvKind kind : {KvKind::kF32, KvKind::kI8}) {
      IndexWorld w(p, 700, kind);
      const auto expected = w.run(700, 1, hw::detect_cpu());
      for (const auto& cpu : float_builds())
        for (int64_t chunk : {700, 64, 37}) EXPECT_EQ(w.run(chunk, chunk == 64 ? 3 : 1, cpu), expected) << hw::describe(cpu) << " chunk " << chunk;
      int64_t checked = 0;
      for (int64_t t = 0; t < 700; t += 13)
        for (int64_t h = 0; h < p.heads; ++h) {
          const int32_t* ids = expected.data() + (t * p.heads + h) * p.topk;
          const int64_t blocks = t / p.block + 1;
          std::vector<double> best(static_cast<size_t>(blocks), -INFINITY);
          for (int64_t j = 0; j <= t; ++j) {
            double dot = 0;
            for (int64_t d = 0; d < p.dim; ++d) dot += double(w.q.at(t, h * p.dim + d)) * w.key(j, d);
            best[size_t(j / p.block)] = std::max(best[size_t(j / p.block)], dot);
          }
          for (int64_t b = std::max<int64_t>(0, blocks - p.local); b < blocks; ++b) best[size_t(b)] = INFINITY;
          std::vector<int32_t> order(static_cast<size_t>(blocks));
          std::iota(order.begin(), order.end(), 0);
          std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return best[size_t(a)] > best[size_t(b)]; });
          const size_t n = size_t(std::min(blocks, p.topk));
          // Near ties may go either way in float.
          if (n < order.size() && best[size_t(order[n - 1])] - best[size_t(order[n])] < 1e-4) continue;
          order.resize(n);
          std::sort(order.begin(), order.end());
          order.resize(size_t(p.topk), -1);
          EXPECT_EQ(std::vector<int32_t>(ids, ids + p.topk), order) << "token " << t << " head " << h;
          ++checked;
        }
      EXPECT_GT(checked, 40);
    }
}

TEST(IndexSelect, TiesGoToTheLowerBlock) {
  IndexWorld w({1, 16, 8, 3, 1}, 80, KvKind::kF32);
  std::fill(w.q.v.begin(), w.q.v.end(), 0.0f);
  const auto out = w.run(80, 1, hw::detect_cpu());
  EXPECT_EQ((std::vector<int32_t>(out.end() - 3, out.end())), (std::vector<int32_t>{0, 1, 9}));
}

TEST(IndexSelect, ManyBlocksAreScoredInGroupsOfRows) {
  IndexWorld w({16, 16, 8, 4, 1}, 2100, KvKind::kBF16);   // 2100 x 16 x 263 scores: above the limit of a group
  EXPECT_EQ(w.run(2100, 3, hw::detect_cpu()), w.run(500, 1, hw::detect_cpu()));
}

}  // namespace
}  // namespace mi::kernels
