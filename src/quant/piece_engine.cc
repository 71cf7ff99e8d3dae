#include "quant/piece_engine.h"

#include <algorithm>
#include <numeric>

#include "artifact/layout.h"

namespace mi::quant {
namespace {

constexpr int64_t kStepSequences = 64;     // each may leave a page half empty
constexpr int64_t kLogits = int64_t(1) << 24;  // numbers of one step's logits: 64 MB

int64_t pages_of(int64_t tokens) { return (tokens + artifact::kKvPageTokens - 1) / artifact::kKvPageTokens; }

}  // namespace

int64_t token_count(const Sequences& s) {
  return std::accumulate(s.begin(), s.end(), int64_t(0), [](int64_t n, const auto& ids) { return n + int64_t(ids.size()); });
}

int64_t longest_of(const Sequences& s) {
  size_t n = 0;
  for (const auto& ids : s) n = std::max(n, ids.size());
  return int64_t(n);
}

Result<PieceEngine> PieceEngine::build(const ir::MirDir& piece, const Path& beside, int opt_level, int64_t longest,
                                       hw::ThreadPool& pool, int64_t step_tokens) {
  PieceEngine p;
  MI_TRY(TemporaryEngine files, build_temporary_engine(piece, beside, opt_level, ""));
  p.files_ = std::make_unique<TemporaryEngine>(std::move(files));
  exec::LoadOptions l;
  l.max_tokens_per_step = std::clamp<int64_t>(kLogits / piece.graph.info.vocab, 1, step_tokens);
  l.kv_pages = std::max(pages_of(longest), pages_of(step_tokens) + kStepSequences);
  l.kv_type = "f32";
  l.weights = "map";  // each weight is read a few times only: a copy would cost more
  l.verify_checksums = false;
  MI_TRY(p.engine_, exec::Engine::load(p.files_->path(), l, pool));
  p.zeros_.resize(size_t(l.max_tokens_per_step));
  p.pages_.resize(size_t(l.kv_pages));
  std::iota(p.pages_.begin(), p.pages_.end(), 0);
  return p;
}

// Whole sequences share a step; one that is longer than a step goes through it in parts, alone.
std::vector<PieceEngine::Step> PieceEngine::steps(const Sequences& sequences, bool ids, bool logits) const {
  const int64_t most = engine_->options().max_tokens_per_step;
  std::vector<Step> out;
  int64_t row = 0, used_pages = 0;
  bool open = false;  // the last step may take more sequences
  for (const std::vector<int32_t>& s : sequences) {
    const int64_t n = int64_t(s.size());
    if (n > most || !open || out.back().tokens + n > most || int64_t(out.back().chunks.size()) == kStepSequences) {
      open = n <= most;
      used_pages = 0;
    }
    for (int64_t at = 0; at < n; at += most) {
      const int64_t rows = std::min(most, n - at);
      if (used_pages == 0 || n > most) out.push_back({{}, row, 0});
      exec::Chunk c;
      c.tokens = ids ? std::span(s).subspan(size_t(at), size_t(rows)) : std::span(zeros_).first(size_t(rows));
      c.start = at;
      c.pages = std::span(pages_).subspan(n > most ? 0 : size_t(used_pages), size_t(pages_of(at + rows)));
      c.logits_from = logits ? 0 : rows;
      out.back().chunks.push_back(c);
      out.back().tokens += rows;
      row += rows;
    }
    used_pages += pages_of(n);
  }
  return out;
}

void PieceEngine::run_layer(const Sequences& sequences, std::span<const float> in, std::span<float> out, const Watch* watch) {
  const int64_t h = hidden();
  int64_t first = 0;
  exec::Tap tap;
  const auto is_result = [](const artifact::Instr& i) { return i.layer >= 0 && i.layer_output; };
  tap.want = [&](const artifact::Instr& i, bool input) {
    return !input && ((is_result(i) && !out.empty()) || (watch && watch->want(i)));
  };
  tap.see = [&](const exec::TapEvent& e) {
    if (watch && watch->want(*e.instr)) watch->see(e, first);
    if (is_result(*e.instr) && !out.empty() && e.operand == &e.instr->out[0])
      std::copy_n(e.values, e.rows * h, out.data() + first * h);
  };
  tap.replaces = [](const artifact::Instr& i) { return i.layer < 0 && i.layer_output; };
  tap.replace = [&](const artifact::Instr&, int64_t row, std::span<float> values) {
    std::copy_n(in.data() + (first + row) * h, h, values.data());
  };
  engine_->set_tap(&tap);
  for (Step& s : steps(sequences, false, false)) {
    first = s.first;
    engine_->run({std::move(s.chunks)});
  }
  engine_->set_tap(nullptr);
}

void PieceEngine::run_embedding(const Sequences& sequences, std::span<float> out) {
  const int64_t h = hidden();
  int64_t first = 0;
  exec::Tap tap;
  tap.want = [](const artifact::Instr& i, bool input) { return !input && i.layer < 0 && i.layer_output; };
  tap.see = [&](const exec::TapEvent& e) { std::copy_n(e.values, e.rows * h, out.data() + first * h); };
  engine_->set_tap(&tap);
  for (Step& s : steps(sequences, true, false)) {
    first = s.first;
    engine_->run({std::move(s.chunks)});
  }
  engine_->set_tap(nullptr);
}

void PieceEngine::run_head(const Sequences& sequences, std::span<const float> in,
                           const std::function<void(int64_t, std::span<const float>)>& see) {
  const int64_t h = hidden();
  int64_t first = 0;
  exec::Tap tap;
  tap.want = [](const artifact::Instr&, bool) { return false; };
  tap.replaces = [](const artifact::Instr& i) { return i.layer < 0 && i.layer_output; };
  tap.replace = [&](const artifact::Instr&, int64_t row, std::span<float> values) {
    std::copy_n(in.data() + (first + row) * h, h, values.data());
  };
  engine_->set_tap(&tap);
  for (Step& s : steps(sequences, true, true)) {
    first = s.first;
    see(first, engine_->run({std::move(s.chunks)}));
  }
  engine_->set_tap(nullptr);
}

}  // namespace mi::quant
