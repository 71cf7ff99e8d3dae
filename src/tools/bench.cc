#include "tools/bench.h"

#include <algorithm>
#include <chrono>
#include <numeric>

#include "base/util.h"

namespace mi::tools {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kPrompt = 128, kBatchTokens = 64;

double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

// Drives the engine directly, the way the step loop does, without sampling beyond the best token.
class Driver {
 public:
  explicit Driver(Session& s) : engine_(*s.engine), vocab_(engine_.manifest().model.vocab) {}

  // streams sequences of `prompt` random tokens, `generate` tokens each (the first comes from the prefill).
  // ttft: until every stream has its first token.
  struct Times { double ttft = 0, total = 0; };
  Times run(int64_t streams, int64_t prompt, int64_t generate) {
    const int64_t pages_each = (prompt + generate + artifact::kKvPageTokens - 1) / artifact::kKvPageTokens;
    MI_CHECK_LE(pages_each * streams, engine_.kv_pages());
    std::vector<std::vector<int32_t>> ids(static_cast<size_t>(streams)), pages(static_cast<size_t>(streams));
    for (int64_t s = 0; s < streams; ++s) {
      for (int64_t i = 0; i < prompt; ++i) ids[size_t(s)].push_back(int32_t(random_u64(uint64_t(++seed_), uint64_t(i)) % uint64_t(vocab_)));
      pages[size_t(s)].resize(size_t(pages_each));
      std::iota(pages[size_t(s)].begin(), pages[size_t(s)].end(), int32_t(s * pages_each));
    }
    std::vector<int32_t> next(static_cast<size_t>(streams));
    const auto start = Clock::now();
    // Prefill, filling each step up to its capacity.
    const int64_t capacity = engine_.options().max_tokens_per_step;
    std::vector<int64_t> done(size_t(streams), 0);
    for (int64_t s = 0; s < streams;) {
      exec::Batch b;
      std::vector<int64_t> finishing;
      for (int64_t room = capacity; room > 0 && s < streams;) {
        const int64_t n = std::min(room, prompt - done[size_t(s)]);
        const bool last = done[size_t(s)] + n == prompt;
        b.chunks.push_back({std::span(ids[size_t(s)]).subspan(size_t(done[size_t(s)]), size_t(n)), done[size_t(s)], pages[size_t(s)], last ? n - 1 : n});
        done[size_t(s)] += n;
        room -= n;
        if (last) finishing.push_back(s++);
      }
      take_best(engine_.run(b), finishing, &next);
    }
    Times t;
    t.ttft = seconds_since(start);
    for (int64_t step = 1; step < generate; ++step) {
      exec::Batch b;
      std::vector<int64_t> order;
      for (int64_t s = 0; s < streams; ++s) {
        b.chunks.push_back({std::span(&next[size_t(s)], 1), prompt + step - 1, pages[size_t(s)], 0});
        order.push_back(s);
      }
      std::vector<int32_t> chosen(next);
      take_best(engine_.run(b), order, &chosen);
      next = chosen;
    }
    t.total = seconds_since(start);
    return t;
  }

 private:
  void take_best(std::span<const float> logits, const std::vector<int64_t>& streams, std::vector<int32_t>* next) {
    for (size_t i = 0; i < streams.size(); ++i) {
      const float* row = logits.data() + i * size_t(vocab_);
      (*next)[size_t(streams[i])] = int32_t(std::max_element(row, row + vocab_) - row);
    }
  }
  exec::Engine& engine_;
  int64_t vocab_;
  int64_t seed_ = 0;
};

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.size() % 2 ? v[v.size() / 2] : (v[v.size() / 2 - 1] + v[v.size() / 2]) / 2;
}

BenchRow measure(Driver& d, const std::string& metric, int64_t n, int rounds) {
  const int64_t streams = metric == "batch" ? n : 1;
  const int64_t prompt = metric == "prefill" ? n : kPrompt;
  const int64_t generate = metric == "prefill" ? 1 : metric == "decode" ? n : kBatchTokens;
  d.run(streams, std::min<int64_t>(prompt, 64), std::min<int64_t>(generate, 4));      // warm-up
  std::vector<double> speed, ttft, total;
  for (int r = 0; r < rounds; ++r) {
    const Driver::Times t = d.run(streams, prompt, generate);
    ttft.push_back(t.ttft);
    speed.push_back(metric == "prefill" ? double(prompt) / t.ttft : double(streams * (generate - 1)) / std::max(t.total - t.ttft, 1e-9));
    total.push_back(double(streams * generate) / t.total);
  }
  const auto [lo, hi] = std::minmax_element(speed.begin(), speed.end());
  return {metric, n, median(speed), *lo, *hi, median(ttft), metric == "prefill" ? 0 : median(total)};
}

}  // namespace

Result<std::vector<BenchRow>> run_bench(Session& s, const BenchOptions& o, const std::function<void(const BenchRow&)>& on_row) {
  const int64_t capacity = s.engine->kv_pages() * artifact::kKvPageTokens;
  struct Case { std::string metric; int64_t n, need; };
  std::vector<Case> cases;
  const auto pages = [](int64_t tokens) { return (tokens + artifact::kKvPageTokens - 1) / artifact::kKvPageTokens * artifact::kKvPageTokens; };
  for (int64_t n : o.prefill) cases.push_back({"prefill", n, pages(n + 1)});
  for (int64_t n : o.decode) cases.push_back({"decode", n, pages(kPrompt + n)});
  for (int64_t n : o.batch) cases.push_back({"batch", n, n * pages(kPrompt + kBatchTokens)});
  for (const Case& c : cases) {
    if (c.n < 1 || (c.metric == "decode" && c.n < 2)) return fail(ErrorCode::kUsage, "--{} {}: too small to measure", c.metric, c.n);
    if (c.need > capacity) return fail(ErrorCode::kUsage, "--{} {} needs room for {} tokens, this session has {}", c.metric, c.n, c.need, capacity);
    const int64_t longest = c.metric == "prefill" ? c.n + 1 : kPrompt + (c.metric == "decode" ? c.n : kBatchTokens);
    const int64_t positions = s.engine->manifest().model.max_positions;
    if (positions > 0 && longest > positions) return fail(ErrorCode::kUsage, "--{} {}: sequences of {} tokens, the model has {} positions", c.metric, c.n, longest, positions);
  }
  Driver d(s);
  std::vector<BenchRow> rows;
  for (const Case& c : cases) {
    rows.push_back(measure(d, c.metric, c.n, o.rounds));
    if (on_row) on_row(rows.back());
  }
  return rows;
}

Json bench_json(const BenchRow& r) {
  Json j{{"metric", r.metric}, {"n", r.n}, {"tok_s", r.tok_s}, {"ttft_s", r.ttft_s}, {"tok_s_min", r.tok_s_min}, {"tok_s_max", r.tok_s_max}};
  if (r.total_tok_s > 0) j["total_tok_s"] = r.total_tok_s;
  return j;
}

std::string bench_table(const std::vector<BenchRow>& rows) {
  std::string s = fmt::format("{:<14} {:>12} {:>21} {:>14}\n", "", "tok/s", "[min - max]", "first token");
  for (const BenchRow& r : rows)
    s += fmt::format("{:<14} {:>12.1f} {:>21} {:>14}\n", fmt::format("{} {}", r.metric, r.n), r.tok_s, fmt::format("[{:.1f} - {:.1f}]", r.tok_s_min, r.tok_s_max), human_seconds(r.ttft_s));
  return s;
}

}  // namespace mi::tools
