#include "runtime/pace.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/util.h"
#include "runtime/draft.h"

namespace mi::runtime {
namespace {

// What a step takes: the answers, experts' weights that short pieces read few of, each token, and attention to all before it.
double mixture(int64_t tokens, int64_t behind) {
  return 0.028 + 0.062 * (1 - std::exp(-double(tokens) / 20)) + 0.00033 * double(tokens) + 6e-8 * double(tokens) * double(behind);
}

struct Read {
  double seconds = 0, longest = 0;
  int steps = 0, beyond = 0;
};
// A prompt of so many tokens beside 4 answers; slower: by what part a step takes longer than it should.
template <typename Slower>
Read read_prompt(Pace& p, double limit, int64_t tokens, Slower slower) {
  Read r;
  for (int64_t left = tokens; left > 0; ++r.steps) {
    const int64_t n = std::min(left, p.prompt_tokens(512));
    const double seconds = mixture(n, tokens - left) * (1 + slower());
    p.ran(4, n, seconds);
    left -= n;
    r.seconds += seconds;
    r.longest = std::max(r.longest, seconds);
    r.beyond += seconds > limit;
  }
  return r;
}
Read read_prompt(Pace& p, double limit, int64_t tokens) {
  return read_prompt(p, limit, tokens, [] { return 0.0; });
}
void answer(Pace& p, int steps, double seconds = 0.028) {
  for (int i = 0; i < steps; ++i) p.ran(4, 0, seconds);
}

TEST(Pace, EveryStepStaysBelowTheLimitFromTheFirstOn) {
  for (const double limit : {0.1, 0.2, 0.5}) {
    Pace p(limit, 1);
    answer(p, 20);
    for (int prompt = 0; prompt < 4; ++prompt) {
      const Read r = read_prompt(p, limit, 8192);
      EXPECT_EQ(r.beyond, 0) << limit;
      EXPECT_GT(r.longest, 0.7 * limit) << "of which most is used";
      answer(p, 20);
    }
  }
}

TEST(Pace, ReadsAboutAsFastAsTheLimitAllows) {
  Pace p(0.2, 1);
  answer(p, 20);
  read_prompt(p, 0.2, 4096);
  // Pieces of 270 tokens take 200 ms at the prompt's start.
  EXPECT_LT(read_prompt(p, 0.2, 4096).steps, 2 * 4096 / 270);
}

// A machine that others use: now and then a step takes a third longer than the one before.
TEST(Pace, StepsThatTakeLongerThanForetoldStayBelowTheLimitToo) {
  Pace p(0.2);
  answer(p, 20);
  uint64_t i = 0;
  const auto slower = [&] { return 0.05 * random_unit(1, ++i) + (i % 40 == 7 ? 0.3 : 0); };
  int beyond = 0, steps = 0;
  for (int prompt = 0; prompt < 50; ++prompt) {
    const Read r = read_prompt(p, 0.2, 4096, slower);
    beyond += r.beyond;
    steps += r.steps;
  }
  EXPECT_GT(steps / 40, 20) << "slow ones";
  EXPECT_LE(beyond, steps / 100) << "of 50 slow ones in 2000";
  // It is forgotten when the machine is even again.
  for (int prompt = 0; prompt < 100; ++prompt) read_prompt(p, 0.2, 4096);
  EXPECT_LT(read_prompt(p, 0.2, 4096).steps, 2 * 4096 / 270);
}

// Seen as 490 ms where 200 were allowed: a piece took no longer than one slow step of answers, and seemed free.
TEST(Pace, ASlowStepOfAnswersMakesNoPieceSeemFree) {
  Pace p(0.2, 1);
  for (int64_t n : {512, 1110, 2048, 426}) p.ran(0, n, 0.46);
  answer(p, 3, 0.079);
  EXPECT_EQ(read_prompt(p, 0.2, 4096).beyond, 0);
  // And is forgotten while prompts keep coming.
  Pace slow(0.2, 1);
  answer(slow, 1, 0.3);
  slow.ran(4, 32, 0.35);
  EXPECT_EQ(slow.prompt_tokens(512), 8);
  for (int i = 0; i < 4; ++i) read_prompt(slow, 0.2, 4096);
  EXPECT_GT(slow.prompt_tokens(512), 100);
}

TEST(Pace, MoreAnswersLeaveLessRoomAtOnce) {
  Pace p(0.2);
  answer(p, 20);
  read_prompt(p, 0.2, 4096);
  const int64_t before = p.prompt_tokens(512);
  for (int i = 0; i < 3; ++i) p.ran(32, 0, 0.1);
  const int64_t after = p.prompt_tokens(512);
  EXPECT_LT(mixture(after, 4096) + 0.072, 0.2);
  EXPECT_LT(after, before);
}

TEST(Pace, GrowsToTheMostAndGoesOnWhenThereIsNoRoom) {
  Pace quick(0.1);
  EXPECT_EQ(quick.prompt_tokens(512), 8) << "nothing is known yet";
  EXPECT_EQ(quick.prompt_tokens(4), 4);
  for (int i = 0; i < 3; ++i) quick.ran(1, quick.prompt_tokens(512), 0.001);
  EXPECT_EQ(quick.prompt_tokens(512), 512);
  Pace slow(0.1);
  slow.ran(32, 0, 0.5);
  slow.ran(32, 32, 1.0);
  EXPECT_EQ(slow.prompt_tokens(512), 8);
  EXPECT_EQ(Pace().prompt_tokens(512), 512) << "switched off";
}

// Weights that take longer to read than the limit: pieces of 8 tokens would read them 512 times.
TEST(Pace, WhereReadingTheWeightsTakesLongTheLimitMayGrow) {
  const auto large = [](int64_t n) { return 0.3 + 0.7 * (1 - std::exp(-double(n) / 20)) + 0.003 * double(n); };
  const auto steps = [&](bool grows) {
    Pace p(0.1, 1, grows);
    answer(p, 20, 0.3);
    int count = 0;
    for (int64_t left = 4096; left > 0; ++count) {
      const int64_t n = std::min(left, p.prompt_tokens(512));
      p.ran(4, n, large(n));
      left -= n;
      if (grows) EXPECT_LT(large(n), 2 * large(32));
    }
    if (grows) EXPECT_NEAR(p.step_limit(), 2 * large(32), 0.1);
    return count;
  };
  EXPECT_EQ(steps(false), 512);
  EXPECT_LT(steps(true), 50);
  // A small model keeps the limit.
  Pace small(0.1, 1, true);
  for (int i = 0; i < 10; ++i) small.ran(4, small.prompt_tokens(512), 0.001 + 0.0001 * double(small.prompt_tokens(512)));
  EXPECT_EQ(small.step_limit(), 0.1);
}

TEST(Pace, WithoutAnswersAStepMayBeLongerButNotForLong) {
  Pace p(0.1, 1);
  EXPECT_EQ(p.prompt_tokens_alone(2048), 512) << "nothing is known yet";
  EXPECT_EQ(p.prompt_tokens_alone(100), 100);
  for (int i = 0; i < 30; ++i) p.ran(0, 512, 0.2);
  EXPECT_EQ(p.prompt_tokens_alone(2048), 2048);
  EXPECT_EQ(p.prompt_tokens_alone(4096), 2560);
  p.ran(0, 512, 10);
  EXPECT_EQ(p.prompt_tokens_alone(2048), 512) << "fewer would read the weights too often";
  EXPECT_EQ(Pace(0.1).prompt_tokens_alone(2048), 2048) << "switched off";
}

TEST(Draft, WhatFollowedTheLatestOccurrence) {
  using V = std::vector<int32_t>;
  EXPECT_EQ(repeat_draft(V{1, 2, 3, 4, 9, 1, 2, 3, 4}, 2), (V{9, 1}));
  EXPECT_EQ(repeat_draft(V{5, 6, 7, 8, 5, 6, 9, 0, 5, 6}, 3), (V{9, 0, 5})) << "the later one of two";
  EXPECT_EQ(repeat_draft(V{1, 2, 3, 8, 7, 2, 3, 9, 1, 2, 3}, 1), (V{8})) << "the longer one before the later one";
  EXPECT_EQ(repeat_draft(V{4, 4, 4}, 5), (V{4}));
  EXPECT_TRUE(repeat_draft(V{1, 2, 3, 4, 5}, 4).empty());
  EXPECT_TRUE(repeat_draft(V{1}, 4).empty());
}

}  // namespace
}  // namespace mi::runtime
