#pragma once
// How many prompt tokens fit into a step beside running answers, so that no gap in their streams is longer than asked
// for, and into one without them, so that who comes meanwhile is not kept waiting. Learns from the steps that ran: what
// a step without prompts takes, what each prompt token adds, and by how much steps take longer than was foretold, so that
// the slow ones stay below the limit, too. A token is cheaper in a long piece than in a short one, where experts' weights
// are read for few tokens: what it adds is learnt by size of pieces. (Qwen3-30B-A3B's layers, 4096 tokens beside 4 answers,
// steps of 100 ms: with one figure for all sizes small pieces seemed the only ones that fit, and the first token took 22 s.)
// Pure arithmetic; the answers do not depend on it.

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

namespace mi::runtime {

class Pace {
 public:
  // The longest that a step should take with running answers, and with none; 0: prompts are not held back.
  explicit Pace(double step_seconds = 0, double alone_seconds = 0)
      : step_seconds_(step_seconds), alone_seconds_(alone_seconds) {}

  // Between 1 and `most`. Before anything is known, kFirst.
  int64_t prompt_tokens(int64_t most) const {
    if (step_seconds_ <= 0) return most;
    return fit(step_seconds_ / overrun_ - decode_seconds_, kFirst, kLeast, most);
  }

  // Without running answers: at least kLeastAlone, below which weights are read too often for too few tokens.
  int64_t prompt_tokens_alone(int64_t most) const {
    if (alone_seconds_ <= 0) return most;
    return fit(alone_seconds_, kLeastAlone, kLeastAlone, most);
  }

  void ran(int64_t decodes, int64_t prompt_tokens, double seconds) {
    if (prompt_tokens == 0) {
      learn(&decode_seconds_, seconds);
    } else if (prompt_tokens >= kLeast) {
      Size& size = sizes_[index(prompt_tokens)];
      // The rest of a prompt, much shorter than the pieces before it, is dearer than they foretell.
      if (decodes > 0 && size.token_seconds > 0 && 4 * prompt_tokens >= 3 * size.last) {
        const double foretold = decode_seconds_ + size.token_seconds * double(prompt_tokens);
        overrun_ = std::max(std::clamp(seconds / foretold, 1.0, kMostOverrun), 1 + kOverrunStays * (overrun_ - 1));
      }
      // The answers' part was at most the whole step: while prompts keep coming, nothing else tells.
      if (decodes > 0) decode_seconds_ = std::min(decode_seconds_, seconds);
      const double rest = decodes > 0 ? seconds - decode_seconds_ : seconds;
      if (rest > 0) learn_token(prompt_tokens, rest / double(prompt_tokens));
    }
  }

 private:
  static constexpr int64_t kFirst = 32;  // small enough for any model, large enough to learn from
  static constexpr int64_t kLeastAlone = 512;
  static constexpr int64_t kLeast = 8;   // prompts go on even if the answers alone take longer than the limit
  // Slower is believed at once, since prompt tokens get dearer the further behind they stand; quicker little by little.
  static void learn(double* value, double seen) {
    *value = std::max(seen, *value > 0 ? 0.8 * *value + 0.2 * seen : 0.0);
  }

  static constexpr double kMostOverrun = 2, kOverrunStays = 0.999;

  struct Size {                // pieces of [2^i, 2^(i+1)) tokens
    double token_seconds = 0;  // what a token of one adds; 0: none ran. The larger i, the less or equal
    int64_t last = 0;          // tokens of the last one
  };
  static size_t index(int64_t tokens) { return std::min<size_t>(size_t(std::bit_width(uint64_t(tokens))) - 1, 31); }

  void learn_token(int64_t tokens, double seen) {
    const size_t at = index(tokens);
    learn(&sizes_[at].token_seconds, seen);
    sizes_[at].last = tokens;
    const double now = sizes_[at].token_seconds;
    for (size_t i = 0; i < sizes_.size(); ++i) {
      double& other = sizes_[i].token_seconds;
      if (other > 0) other = i < at ? std::max(other, now) : std::min(other, now);
    }
  }

  // The longest piece that takes at most `room` seconds. first: tried while nothing as short as what fits has run.
  int64_t fit(double room, int64_t first, int64_t least, int64_t most) const {
    size_t shortest = 0;
    while (shortest < sizes_.size() && sizes_[shortest].token_seconds <= 0) ++shortest;
    if (shortest == sizes_.size()) return std::min(most, first);
    int64_t best = 0;
    double token = 0;
    for (size_t i = shortest; i < sizes_.size(); ++i) {
      if (sizes_[i].token_seconds > 0) token = sizes_[i].token_seconds;  // longer ones that never ran take no more
      const double tokens = std::min(room / token, double((int64_t(2) << i) - 1));
      if (tokens >= double(int64_t(1) << i)) best = int64_t(tokens);
    }
    if (best == 0) best = shortest > index(first) ? first : int64_t(std::max(room, 0.0) / sizes_[shortest].token_seconds);
    return std::min(most, std::max(best, least));
  }

  double step_seconds_, alone_seconds_;
  double overrun_ = 1;  // the largest of late that a step took of what was foretold
  double decode_seconds_ = 0;
  std::array<Size, 32> sizes_;
};

}  // namespace mi::runtime
