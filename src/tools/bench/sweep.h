#pragma once
// The matrix of prompt lengths and batch sizes: more work at once must not cost more per token. Cells that break this
// are named.

#include <string>
#include <vector>

#include "base/json.h"
#include "base/result.h"
#include "exec/engine.h"

namespace mi::tools {

struct SweepAxes {
  std::vector<int64_t> prompts{1, 8, 64, 512}, batches{1, 4, 16};  // ascending
  int64_t generate = 17;  // tokens of each sequence: the first comes from the prompt, the others are decoded
  int rounds = 3;
};

struct SweepCell {
  int64_t prompt = 0, batch = 0;
  std::vector<double> prefill,
      decode;  // tok/s of each round: prompt tokens to the last first token; generated tokens after it
  std::vector<std::string> notes;  // "decode: 12 % slower per token than batch 1"
};

int64_t sweep_kv_tokens(const SweepAxes& a);
// Error (kUsage): the model has too few positions (0: no limit).
Status check_sweep(const SweepAxes& a, int64_t positions);
// Cells in the order of prompts, then batches. Precondition: check_sweep(), and KV pages for sweep_kv_tokens().
std::vector<SweepCell> run_sweep(exec::Engine& engine, const SweepAxes& a);

// Sets each cell's notes. A cell is slower per token than a smaller neighbour (the next shorter prompt, the next
// smaller batch) when even its fastest round is slower than the neighbour's median. Decoding is compared between
// batches only: after a longer prompt each token attends to more.
void note_slow_cells(std::vector<SweepCell>* cells);

std::string sweep_table(const std::vector<SweepCell>& cells);
Json sweep_json(const SweepCell& c);  // {"sweep": {...}}, one line of JSON output

}  // namespace mi::tools
