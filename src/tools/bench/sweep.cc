#include "tools/bench/sweep.h"

#include <algorithm>

#include "tools/clock.h"
#include "tools/driver.h"
#include "tools/stats.h"

namespace mi::tools {
namespace {

void run_cell(Driver& d, SweepCell* c, int64_t generate, uint64_t seed) {
  d.start(c->batch, c->prompt, generate, seed);
  auto start = Clock::now();
  d.prefill();
  c->prefill.push_back(double(c->batch * c->prompt) / seconds_since(start));
  start = Clock::now();
  d.decode(generate - 1);
  c->decode.push_back(double(c->batch * (generate - 1)) / seconds_since(start));
}

// The cell with the next smaller value of one coordinate and the same other one; null: none.
const SweepCell* below(const std::vector<SweepCell>& cells, const SweepCell& c, int64_t SweepCell::*moves,
                       int64_t SweepCell::*stays) {
  const SweepCell* best = nullptr;
  for (const SweepCell& o : cells)
    if (o.*stays == c.*stays && o.*moves < c.*moves && (!best || o.*moves > best->*moves)) best = &o;
  return best;
}

void compare(const SweepCell* smaller, const char* what, const std::string& which,
             std::vector<double> SweepCell::*speed, SweepCell* c) {
  if (!smaller) return;
  const double then = median(smaller->*speed), now = median(c->*speed);
  if (*std::max_element((c->*speed).begin(), (c->*speed).end()) >= then) return;
  c->notes.push_back(fmt::format("{}: {:.0f} % slower per token than {}", what, 100 * (then / now - 1), which));
}

std::string cell_name(const SweepCell& c) { return fmt::format("prompt {} x batch {}", c.prompt, c.batch); }

}  // namespace

int64_t sweep_kv_tokens(const SweepAxes& a) {
  const int64_t prompt = *std::max_element(a.prompts.begin(), a.prompts.end()),
                batch = *std::max_element(a.batches.begin(), a.batches.end());
  return Driver::pages_needed(batch, prompt + a.generate) * artifact::kKvPageTokens;
}

Status check_sweep(const SweepAxes& a, int64_t positions) {
  const int64_t longest = *std::max_element(a.prompts.begin(), a.prompts.end()) + a.generate;
  if (positions > 0 && longest > positions)
    return fail(ErrorCode::kUsage, "--sweep: sequences of {} tokens, the model has {} positions", longest, positions);
  return {};
}

std::vector<SweepCell> run_sweep(exec::Engine& engine, const SweepAxes& a) {
  Driver d(engine);
  std::vector<SweepCell> cells;
  uint64_t seed = 1;
  for (int64_t p : a.prompts)
    for (int64_t b : a.batches) {
      cells.push_back({p, b, {}, {}, {}});
      SweepCell warm = cells.back();
      run_cell(d, &warm, 3, seed++);
    }
  for (int r = 0; r < a.rounds; ++r)
    for (SweepCell& c : cells) run_cell(d, &c, a.generate, seed++);
  note_slow_cells(&cells);
  return cells;
}

void note_slow_cells(std::vector<SweepCell>* cells) {
  for (SweepCell& c : *cells) {
    c.notes.clear();
    const SweepCell* fewer = below(*cells, c, &SweepCell::batch, &SweepCell::prompt);
    const SweepCell* shorter = below(*cells, c, &SweepCell::prompt, &SweepCell::batch);
    const std::string batch = fewer ? fmt::format("batch {}", fewer->batch) : "",
                      prompt = shorter ? fmt::format("prompt {}", shorter->prompt) : "";
    compare(shorter, "prefill", prompt, &SweepCell::prefill, &c);
    compare(fewer, "prefill", batch, &SweepCell::prefill, &c);
    compare(fewer, "decode", batch, &SweepCell::decode, &c);
  }
}

std::string sweep_table(const std::vector<SweepCell>& cells) {
  std::vector<int64_t> batches;
  for (const SweepCell& c : cells)
    if (std::find(batches.begin(), batches.end(), c.batch) == batches.end()) batches.push_back(c.batch);
  std::string s;
  const std::pair<const char*, std::vector<double> SweepCell::*> halves[] = {{"prefill", &SweepCell::prefill},
                                                                             {"decode", &SweepCell::decode}};
  for (const auto& [what, speed] : halves) {
    s += fmt::format("{:<16}", fmt::format("{}, tok/s", what));
    for (int64_t b : batches) s += fmt::format(" {:>12}", fmt::format("batch {}", b));
    for (size_t i = 0; i < cells.size(); ++i) {
      if (i % batches.size() == 0) s += fmt::format("\n{:<16}", fmt::format("prompt {}", cells[i].prompt));
      const bool noted = std::any_of(cells[i].notes.begin(), cells[i].notes.end(),
                                     [name = what](const std::string& n) { return n.rfind(name, 0) == 0; });
      s += fmt::format(" {:>12}", fmt::format("{:.1f}{}", median(cells[i].*speed), noted ? " *" : "  "));
    }
    s += "\n";
  }
  for (const SweepCell& c : cells)
    for (const std::string& n : c.notes) s += fmt::format("* {}, {}\n", cell_name(c), n);
  return s;
}

Json sweep_json(const SweepCell& c) {
  return {{"sweep",
           {{"prompt", c.prompt},
            {"batch", c.batch},
            {"prefill_tok_s", median(c.prefill)},
            {"decode_tok_s", median(c.decode)},
            {"prefill_tok_s_rounds", c.prefill},
            {"decode_tok_s_rounds", c.decode},
            {"notes", c.notes}}}};
}

}  // namespace mi::tools
