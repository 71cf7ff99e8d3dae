#pragma once
// How many prompt tokens fit into a step beside running answers, so that no gap in their streams is longer than asked
// for, and into one without them, so that who comes meanwhile is not kept waiting. Learns from the steps that ran: what a step without prompts takes, what each prompt token adds, and by how much
// steps take longer than was foretold, so that the slow ones stay below the limit, too. Pure arithmetic; the answers do
// not depend on it.

#include <algorithm>
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
    if (token_seconds_ <= 0) return std::min(most, kFirst);
    const double room = (step_seconds_ / overrun_ - decode_seconds_) / token_seconds_;
    return int64_t(std::clamp(room, double(std::min(most, kLeast)), double(most)));
  }

  // Without running answers: at least kLeastAlone, below which weights are read too often for too few tokens.
  int64_t prompt_tokens_alone(int64_t most) const {
    if (alone_seconds_ <= 0) return most;
    const double room = token_seconds_ > 0 ? alone_seconds_ / token_seconds_ : 0;
    return int64_t(std::clamp(room, double(std::min(most, kLeastAlone)), double(most)));
  }

  void ran(int64_t decodes, int64_t prompt_tokens, double seconds) {
    if (prompt_tokens == 0) {
      learn(&decode_seconds_, seconds);
    } else if (prompt_tokens >= kLeast) {
      if (decodes > 0 && token_seconds_ > 0) {
        const double foretold = decode_seconds_ + token_seconds_ * double(prompt_tokens);
        overrun_ = std::max(std::clamp(seconds / foretold, 1.0, kMostOverrun), 1 + kOverrunStays * (overrun_ - 1));
      }
      // The answers' part was at most the whole step: while prompts keep coming, nothing else tells.
      if (decodes > 0) decode_seconds_ = std::min(decode_seconds_, seconds);
      const double rest = decodes > 0 ? seconds - decode_seconds_ : seconds;
      if (rest > 0) learn(&token_seconds_, rest / double(prompt_tokens));
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

  double step_seconds_, alone_seconds_;
  double overrun_ = 1;  // the largest of late that a step took of what was foretold
  double decode_seconds_ = 0, token_seconds_ = 0;
};

}  // namespace mi::runtime
