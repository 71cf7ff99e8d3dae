#pragma once
// How many prompt tokens fit into a step beside running answers, so that no gap in their streams is longer than asked
// for, and into one without them, so that who comes meanwhile is not kept waiting. Learns from the steps that ran, by
// the size of their pieces: what a whole step took. From one size to the next larger one only this is believed: a step
// takes no more time per prompt token, for its answers and the weights are read once. (Taking the answers' part off
// first, and dividing the rest, let one slow step of answers make long pieces seem free: 490 ms where 200 were allowed.)
// The limit is not planned to the full: the next piece stands further behind, where attention takes longer, and now and
// then a step takes longer than the one before. Pure arithmetic; the answers do not depend on it.

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

namespace mi::runtime {

// What steps took, by the size of their pieces: half octaves.
class PieceTimes {
 public:
  // base: what a step without a piece takes now.
  void ran(int64_t tokens, double seconds, double base) {
    const size_t at = index(tokens);
    Size& size = sizes_[at];
    // Slower is believed at once, quicker little by little.
    size = {tokens, std::max(seconds, kKeep * size.seconds + (1 - kKeep) * seconds), base};
    // What has not run for long is forgotten slowly, so that it is tried again; but longer pieces take longer.
    for (size_t i = 0; i < sizes_.size(); ++i) {
      Size& other = sizes_[i];
      if (other.tokens == 0 || i == at) continue;
      other.seconds = i < at ? std::min(other.seconds, size.seconds) : std::max(kForget * other.seconds, size.seconds);
    }
  }

  // The longest piece with which a step takes at most `limit`: at least `least`; `first` before anything is known.
  int64_t fit(double limit, double base, int64_t first, int64_t least) const {
    const Size* good = nullptr;
    double best = 0;
    for (const Size& s : sizes_) {
      if (s.tokens == 0) continue;
      const double seconds = now(s, base);
      if (seconds > limit) {
        // All fixed parts are in it: halving the time takes more than halving the piece.
        if (!good) return std::max(least, int64_t(double(s.tokens) * (limit / seconds) * (limit / seconds)));
        const double below = now(*good, base);
        const double between = double(good->tokens) + double(s.tokens - good->tokens) * (limit - below) / (seconds - below);
        best = std::min(best, std::max(between, double(good->tokens)));
        break;
      }
      good = &s;
      best = std::max(best, double(s.tokens) * limit / seconds);
    }
    if (!good) return std::max(first, least);
    return std::max(least, int64_t(std::min(best, kMost)));
  }

  // Of the shortest piece of at least so many tokens that ran; 0: none.
  double shortest(int64_t tokens) const {
    for (size_t i = index(tokens); i < sizes_.size(); ++i)
      if (sizes_[i].tokens > 0) return sizes_[i].seconds;
    return 0;
  }

  // What a step with such a piece is foretold to take at most; 0: nothing as short has run.
  double foretell(int64_t tokens, double base) const {
    for (size_t i = index(tokens) + 1; i-- > 0;)
      if (const Size& s = sizes_[i]; s.tokens > 0)
        return now(s, base) * std::max(1.0, double(tokens) / double(s.tokens));
    return 0;
  }

 private:
  struct Size {
    int64_t tokens = 0;   // of the last piece; 0: none ran
    double seconds = 0;   // of the whole step
    double base = 0;      // of a step without a piece, then
  };
  static constexpr double kKeep = 0.8, kForget = 0.98;
  static constexpr double kMost = 1e9;
  static size_t index(int64_t tokens) {
    const size_t octave = size_t(std::bit_width(uint64_t(tokens))) - 1;
    const size_t half = octave > 0 ? size_t(tokens) >> (octave - 1) & 1 : 0;
    return std::min<size_t>(2 * octave + half, 63);
  }
  // More answers than then make the step longer by what they take.
  static double now(const Size& s, double base) { return s.seconds + std::max(0.0, base - s.base); }

  std::array<Size, 64> sizes_;
};

class Pace {
 public:
  // The longest that a step should take with running answers, and with none; 0: prompts are not held back.
  // grows: the first is only where a step reads the weights faster; else it is twice what one takes with kReads prompt
  // tokens, for which nearly all weights are read: a prompt then takes about twice its time, instead of crawling.
  explicit Pace(double step_seconds = 0, double alone_seconds = 0, bool grows = false)
      : step_seconds_(step_seconds), alone_seconds_(alone_seconds), least_(grows ? kReads : kLeast), grows_(grows) {}

  double step_limit() const { return grows_ ? std::max(step_seconds_, 2 * beside_.shortest(kReads)) : step_seconds_; }

  // Between 1 and `most`.
  int64_t prompt_tokens(int64_t most) const {
    if (step_seconds_ <= 0) return most;
    return std::min(most, beside_.fit(step_limit() / overrun_, decode_seconds_, least_, least_));
  }

  // Without running answers: at least kLeastAlone, below which weights are read too often for too few tokens.
  int64_t prompt_tokens_alone(int64_t most) const {
    if (alone_seconds_ <= 0) return most;
    return std::min(most, alone_.fit(alone_seconds_, 0, kLeastAlone, kLeastAlone));
  }

  void ran(int64_t decodes, int64_t prompt_tokens, double seconds) {
    if (prompt_tokens == 0) {
      decode_seconds_ = std::max(seconds, 0.8 * decode_seconds_ + 0.2 * seconds);
    } else if (decodes == 0) {
      if (prompt_tokens >= kLeast) alone_.ran(prompt_tokens, seconds, 0);
    } else if (prompt_tokens >= kLeast) {
      const double foretold = beside_.foretell(prompt_tokens, decode_seconds_);
      // A limit that nobody asked for is not worth half the prompts' speed, which one slow step would cost for minutes.
      if (foretold > 0 && !grows_)
        overrun_ = std::clamp(std::max(seconds / foretold, kRoom + kOverrunStays * (overrun_ - kRoom)), kRoom, kMostOverrun);
      beside_.ran(prompt_tokens, seconds, decode_seconds_);
    }
  }

 private:
  static constexpr int64_t kLeast = 8;  // prompts go on even if the answers alone take longer than the limit
  static constexpr int64_t kReads = 32;
  static constexpr int64_t kLeastAlone = 512;
  static constexpr double kRoom = 1.25, kMostOverrun = 2, kOverrunStays = 0.997;

  double step_seconds_, alone_seconds_;
  int64_t least_ = kLeast;
  bool grows_ = false;
  double overrun_ = kRoom;  // the largest of late that a step took of what was foretold, and at least the room that is kept
  double decode_seconds_ = 0;
  PieceTimes beside_, alone_;
};

}  // namespace mi::runtime
