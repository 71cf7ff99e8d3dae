#pragma once
// Engines of pieces of a model (ir::piece_of): one layer at a time, or embedding and head alone, fed with rows of the
// residual stream. Calibration, rounding and comparison walk a model through them, so that memory holds one layer's
// weights whatever the model's size.

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "exec/engine.h"
#include "ir/mir_dir.h"
#include "quant/temporary_engine.h"

namespace mi::quant {

using Sequences = std::vector<std::vector<int32_t>>;
int64_t token_count(const Sequences& s);
int64_t longest_of(const Sequences& s);

// What a piece shows while it runs. first_row: the place of the event's row 0 among the rows of the whole run (tokens;
// times k for pairs).
struct Watch {
  std::function<bool(const artifact::Instr&)> want;  // results only
  std::function<void(const exec::TapEvent&, int64_t first_token)> see;
};

class PieceEngine {
 public:
  // longest: of the sequences that will be run. step_tokens: rows that go through together. beside, opt_level: see
  // build_temporary_engine. Float matrices stay as the model has them: kernels widen them exactly.
  static Result<PieceEngine> build(const ir::MirDir& piece, const Path& beside, int opt_level, int64_t longest,
                                   hw::ThreadPool& pool, int64_t step_tokens = 1024);

  // A layer: in and out are [tokens, hidden], the rows of all sequences one after the other; out may be in, or empty.
  // Each sequence stands alone.
  void run_layer(const Sequences& s, std::span<const float> in, std::span<float> out, const Watch* watch = nullptr);
  // Embedding: [tokens, hidden]. Of the piece of both ends.
  void run_embedding(const Sequences& s, std::span<float> out);
  // Head, of the same piece: see(first token, logits [rows, vocab]) for all rows in order.
  void run_head(const Sequences& s, std::span<const float> in,
                const std::function<void(int64_t, std::span<const float>)>& see);

  int64_t hidden() const { return engine_->manifest().model.hidden; }
  int64_t vocab() const { return engine_->manifest().model.vocab; }

 private:
  struct Step {
    std::vector<exec::Chunk> chunks;
    int64_t first = 0, tokens = 0;
  };
  std::vector<Step> steps(const Sequences& sequences, bool ids, bool logits) const;

  std::unique_ptr<TemporaryEngine> files_;
  std::unique_ptr<exec::Engine> engine_;
  std::vector<int32_t> zeros_, pages_;
};

}  // namespace mi::quant
