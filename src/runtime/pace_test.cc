#include "runtime/pace.h"

#include <gtest/gtest.h>

#include "base/util.h"
#include "runtime/draft.h"

namespace mi::runtime {
namespace {

TEST(Pace, StepsStayBelowTheLimitWhilePromptTokensGetDearer) {
  Pace p(0.1);
  EXPECT_EQ(p.prompt_tokens(512), 32) << "nothing is known yet";
  for (int i = 0; i < 20; ++i) p.ran(4, 0, 0.02);
  double token = 0.001;
  for (int i = 0; i < 200; ++i) {
    const int64_t n = p.prompt_tokens(512);
    const double seconds = 0.02 + double(n) * token;
    EXPECT_LT(seconds, 0.105) << i;
    p.ran(4, n, seconds);
    token *= 1.01;
  }
  EXPECT_EQ(p.prompt_tokens(4), 4);
}

TEST(Pace, GrowsToTheMostAndGoesOnWhenThereIsNoRoom) {
  Pace quick(0.1);
  for (int i = 0; i < 50; ++i) quick.ran(1, quick.prompt_tokens(512), 0.001);
  EXPECT_EQ(quick.prompt_tokens(512), 512);
  Pace slow(0.1);
  slow.ran(32, 0, 0.5);
  slow.ran(32, 32, 1.0);
  EXPECT_EQ(slow.prompt_tokens(512), 8);
  EXPECT_EQ(Pace().prompt_tokens(512), 512) << "switched off";
}

TEST(Pace, WithoutAnswersAStepMayBeLongerButNotForLong) {
  Pace p(0.1, 1);
  EXPECT_EQ(p.prompt_tokens_alone(2048), 512) << "nothing is known yet";
  EXPECT_EQ(p.prompt_tokens_alone(100), 100);
  for (int i = 0; i < 30; ++i) p.ran(0, 512, 0.2);
  EXPECT_EQ(p.prompt_tokens_alone(2048), 2048);
  EXPECT_NEAR(p.prompt_tokens_alone(4096), 2560, 2);
  p.ran(0, 512, 10);
  EXPECT_EQ(p.prompt_tokens_alone(2048), 512) << "fewer would read the weights too often";
  EXPECT_EQ(Pace(0.1).prompt_tokens_alone(2048), 2048) << "switched off";
}

// A machine that others use: now and then a step takes a third longer than the one before.
TEST(Pace, StepsThatTakeLongerThanForetoldStayBelowTheLimitToo) {
  Pace p(0.1);
  for (int i = 0; i < 20; ++i) p.ran(4, 0, 0.02);
  int beyond = 0;
  double read = 0;
  for (uint64_t i = 0; i < 2000; ++i) {
    const int64_t n = p.prompt_tokens(512);
    const double seconds = (0.02 + double(n) * 0.0005) * (1 + 0.05 * random_unit(1, i) + (i % 40 == 7 ? 0.3 : 0));
    beyond += seconds > 0.105;
    read += double(n);
    p.ran(4, n, seconds);
  }
  EXPECT_LE(beyond, 4) << "the first ones cannot be foretold; of 50";
  EXPECT_GT(read / 2000, 90) << "of 160 that would fit without the slow steps";
  // On a machine that is even nothing is given away.
  Pace even(0.1);
  for (int i = 0; i < 20; ++i) even.ran(4, 0, 0.02);
  for (int i = 0; i < 2000; ++i) even.ran(4, even.prompt_tokens(512), 0.02 + double(even.prompt_tokens(512)) * 0.0005);
  EXPECT_GE(even.prompt_tokens(512), 159);
  // It is forgotten when the machine is even again.
  for (int i = 0; i < 5000; ++i) p.ran(4, p.prompt_tokens(512), 0.02 + double(p.prompt_tokens(512)) * 0.0005);
  EXPECT_GE(p.prompt_tokens(512), 158);
}

TEST(Pace, OneSlowStepOfAnswersIsForgottenWhilePromptsKeepComing) {
  Pace p(0.1);
  p.ran(32, 0, 0.15);
  p.ran(32, 32, 0.2);
  EXPECT_EQ(p.prompt_tokens(512), 8);
  for (int i = 0; i < 100; ++i) {
    const int64_t n = p.prompt_tokens(512);
    p.ran(1, n, 0.02 + double(n) * 0.0002);
  }
  EXPECT_GT(p.prompt_tokens(512), 100) << "about 400 would fit";
}

// A mixture of experts: a piece takes 50 ms to read their weights however short it is, if it is not very short.
TEST(Pace, AFixedPartOfAPieceDoesNotMakePiecesShort) {
  const auto piece = [](int64_t n) { return 0.05 * std::min(1.0, double(n) / 16) + 0.0003 * double(n); };
  Pace p(0.1, 1);
  for (int i = 0; i < 3; ++i) p.ran(0, 2048, piece(2048));
  for (int i = 0; i < 20; ++i) p.ran(4, 0, 0.02);
  EXPECT_EQ(p.prompt_tokens(2048), 32) << "long pieces tell nothing of short ones";
  for (int prompt = 0; prompt < 5; ++prompt)
    for (int64_t left = 4096; left > 0;) {
      const int64_t n = std::min(left, p.prompt_tokens(2048));
      EXPECT_LE(0.02 + piece(n), 0.101);
      p.ran(4, n, 0.02 + piece(n));
      left -= n;
    }
  EXPECT_GT(p.prompt_tokens(2048), 70) << "100 fit";
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
