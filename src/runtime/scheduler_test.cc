#include "runtime/scheduler.h"

#include <gtest/gtest.h>

#include <list>
#include <memory>

#include "runtime/testing.h"

namespace mi::runtime {
namespace {

std::unique_ptr<Sequence> sequence(int64_t prompt) {
  auto s = std::make_unique<Sequence>();
  s->prompt_len = prompt;
  s->tokens.assign(size_t(prompt), 1);
  return s;
}

// Runs the plan and appends a token to whatever sampled.
void run(Scheduler& s, const StepPlan& plan) {
  s.advance(plan);
  for (const Work& w : plan.work) {
    if (w.samples) w.seq->tokens.push_back(1);
  }
  s.check_invariants();
}

TEST(PagePool, ConservesPagesAndRefusesHalfAnAnswer) {
  kv::PagePool pool(3);
  std::vector<int32_t> a, b;
  EXPECT_TRUE(pool.take(2, &a));
  EXPECT_FALSE(pool.take(2, &b));
  EXPECT_TRUE(b.empty());
  EXPECT_EQ(pool.free_pages(), 1);
  EXPECT_TRUE(pool.take(1, &b));
  EXPECT_NE(a[0], b[0]);
  EXPECT_NE(a[1], b[0]);
  std::vector<int32_t> freed;
  kv::PagePool tells(2, [&](std::span<const int32_t> pages) { freed.assign(pages.begin(), pages.end()); });
  std::vector<int32_t> c;
  EXPECT_TRUE(tells.take(2, &c));
  tells.give_back(c);
  EXPECT_EQ(freed, c);
  pool.give_back(a);
  pool.give_back(b);
  EXPECT_EQ(pool.free_pages(), 3);
  EXPECT_DEATH(pool.give_back(a), "is not in use");
}

TEST(Scheduler, PromptsAreCutIntoChunksAndSampleAtTheirEnd) {
  Scheduler s({.max_batch_size = 4, .max_tokens_per_step = 64, .prefill_tokens = 10}, 100);
  auto a = sequence(25);
  s.add(a.get());
  for (int64_t want : {10, 10, 5}) {
    StepPlan p = s.plan();
    ASSERT_EQ(p.work.size(), 1u);
    EXPECT_EQ(p.work[0].tokens, want);
    EXPECT_EQ(p.work[0].samples, want == 5);
    EXPECT_EQ(p.work[0].logits_from, want == 5 ? 4 : want);
    run(s, p);
  }
  StepPlan p = s.plan();
  EXPECT_EQ(p.decodes, 1);
  EXPECT_EQ(p.work[0].tokens, 1);
  s.remove(a.get());
}

TEST(Scheduler, EveryDecodeRunsEveryStepWhileALongPromptComes) {
  Scheduler s(
      {.max_batch_size = 8, .max_tokens_per_step = 64, .prefill_tokens = 64, .prefill_tokens_beside_decodes = 16}, 200);
  std::vector<std::unique_ptr<Sequence>> all;
  for (int i = 0; i < 3; ++i) s.add(all.emplace_back(sequence(4)).get());
  run(s, s.plan());
  s.add(all.emplace_back(sequence(1000)).get());
  int steps = 0;
  for (; all[3]->computed < 1000; ++steps) {
    StepPlan p = s.plan();
    EXPECT_EQ(p.decodes, 3);
    ASSERT_EQ(p.work.size(), 4u);
    EXPECT_LE(p.work[3].tokens, 16);
    run(s, p);
  }
  EXPECT_EQ(steps, 63);
  for (auto& a : all) s.remove(a.get());
}

TEST(Scheduler, ScoringAPromptAsksForAllItsRowsOnly) {
  Scheduler s({.max_batch_size = 4, .max_tokens_per_step = 64, .prefill_tokens = 8}, 100);
  auto a = sequence(12);
  a->score_prompt = true;
  s.add(a.get());
  StepPlan p = s.plan();
  EXPECT_EQ(p.work[0].logits_from, 0);
  EXPECT_FALSE(p.work[0].samples);
  run(s, p);
  p = s.plan();
  EXPECT_EQ(p.work[0].logits_from, 0);
  EXPECT_TRUE(p.work[0].samples);
  run(s, p);
  EXPECT_EQ(s.plan().work[0].logits_from, 0);
  s.remove(a.get());
}

TEST(Scheduler, YoungestIsPreemptedAndComesBackWithItsTokens) {
  Scheduler s({.max_batch_size = 4, .max_tokens_per_step = 256, .prefill_tokens = 256, .reuse_prefixes = false}, 4);
  auto a = sequence(63), b = sequence(63);
  s.add(a.get());
  s.add(b.get());
  run(s, s.plan());
  run(s, s.plan());
  // Both hold a page and want a second and then, 64 tokens on, a third.
  int64_t preempted = 0;
  for (int i = 0; i < 70 && preempted == 0; ++i) {
    StepPlan p = s.plan();
    preempted = p.preempted;
    if (preempted) {
      EXPECT_TRUE(a->running);
      EXPECT_FALSE(b->running);
      EXPECT_EQ(b->computed, 0);
      ASSERT_EQ(p.work.size(), 1u);
    }
    run(s, p);
  }
  EXPECT_EQ(preempted, 1);
  const size_t kept = b->tokens.size();
  s.remove(a.get());
  StepPlan p = s.plan();
  ASSERT_EQ(p.work.size(), 1u);
  EXPECT_EQ(p.work[0].seq, b.get());
  EXPECT_EQ(p.work[0].tokens, int64_t(kept));
  run(s, p);
  EXPECT_EQ(b->tokens.size(), kept + 1);
  s.remove(b.get());
}

TEST(Scheduler, AdmissionLeavesEachRunningSequenceAPageToGrow) {
  Scheduler s({.max_batch_size = 4, .max_tokens_per_step = 256, .prefill_tokens = 256}, 4);
  auto a = sequence(64), b = sequence(60), c = sequence(60), d = sequence(60);
  for (Sequence* q : {a.get(), b.get(), c.get(), d.get()}) s.add(q);
  EXPECT_EQ(s.plan().work.size(), 2u);  // 4 pages: one each, and one each to come
  EXPECT_EQ(s.waiting(), 2);
  s.check_invariants();
  s.remove(c.get());
  EXPECT_EQ(s.waiting(), 1);
  s.remove(a.get());
  s.remove(b.get());
  EXPECT_EQ(s.plan().work.size(), 1u);
  s.remove(d.get());
}

TEST(Scheduler, WhatAnEarlierSequenceComputedIsTakenOver) {
  Scheduler s({.max_batch_size = 4, .max_tokens_per_step = 512, .prefill_tokens = 512}, 16);
  auto a = sequence(200);
  s.add(a.get());
  run(s, s.plan());
  auto b = sequence(200), other = sequence(200), scored = sequence(200);
  other->salt = "other";
  scored->score_prompt = true;
  for (Sequence* q : {b.get(), other.get(), scored.get()}) s.add(q);
  StepPlan p = s.plan();
  ASSERT_EQ(p.work.size(), 3u) << "the decode, b and part of other: 16 pages hold no more";
  EXPECT_EQ(b->reused, 192) << "three whole pages of the four";
  EXPECT_EQ(p.work[1].tokens, 8);
  EXPECT_EQ(other->reused, 0) << "another salt";
  EXPECT_EQ(s.cache().used_pages(), 4 + 1 + 4) << "a's, the one that b does not share, other's";
  run(s, p);
  s.remove(a.get());
  s.remove(b.get());
  EXPECT_EQ(s.cache().used_pages(), 4);
  EXPECT_EQ(s.cache().idle_pages(), 3);
  p = s.plan();
  EXPECT_EQ(scored->reused, 0) << "all its rows are asked for";
  run(s, p);
  s.remove(other.get());
  s.remove(scored.get());
  EXPECT_EQ(s.cache().free_pages(), 16);
}

TEST(Scheduler, SmallerPriorityNumbersGoFirstAndTakePlaces) {
  Scheduler s({.max_batch_size = 2, .max_tokens_per_step = 64, .prefill_tokens = 64}, 16);
  auto a = sequence(4), b = sequence(4), late = sequence(4), urgent = sequence(4);
  b->priority = 5;
  urgent->priority = -1;
  for (Sequence* q : {a.get(), b.get(), late.get()}) s.add(q);
  run(s, s.plan());
  EXPECT_TRUE(a->running && late->running) << "0 before 5, whatever came first";
  EXPECT_FALSE(b->running);
  s.add(urgent.get());
  StepPlan p = s.plan();
  EXPECT_EQ(p.preempted, 1);
  EXPECT_TRUE(a->running && urgent->running);
  EXPECT_FALSE(late->running) << "the later one of the larger number";
  run(s, p);
  s.remove(urgent.get());
  run(s, s.plan());
  EXPECT_TRUE(late->running);
  s.remove(a.get());
  s.remove(late.get());
  run(s, s.plan());
  EXPECT_TRUE(b->running);
  s.remove(b.get());
}

TEST(Scheduler, NobodyIsPreemptedForWhatWouldNotFitAnyway) {
  Scheduler s({.max_batch_size = 4, .max_tokens_per_step = 1024, .prefill_tokens = 1024, .reuse_prefixes = false}, 12);
  auto first = sequence(500), later = sequence(60), wants = sequence(400);
  later->priority = 5;
  wants->priority = 1;
  s.add(first.get());
  s.add(later.get());
  run(s, s.plan());
  EXPECT_TRUE(first->running && later->running);
  s.add(wants.get());
  StepPlan p = s.plan();
  EXPECT_EQ(p.preempted, 0) << "8 of 12 pages are the first one's; 7 and room to grow do not fit beside them";
  EXPECT_TRUE(later->running);
  run(s, p);
  s.remove(first.get());
  p = s.plan();
  EXPECT_TRUE(wants->running);
  run(s, p);
  s.remove(later.get());
  s.remove(wants.get());
}

TEST(Scheduler, DraftsTakeOnlyWhatIsLeft) {
  Scheduler s({.max_batch_size = 2, .max_tokens_per_step = 8, .prefill_tokens = 8, .prefill_tokens_beside_decodes = 4},
              3);
  auto a = sequence(4), b = sequence(30);
  s.add(a.get());
  run(s, s.plan());
  a->draft = {1, 1, 1, 1, 1, 1};
  s.add(b.get());
  StepPlan p = s.plan();
  ASSERT_EQ(p.work.size(), 2u);
  EXPECT_EQ(p.work[0].drafts, 3) << "8 rows, one for the decode, four for the prompt";
  s.advance(p);
  a->tokens.push_back(1);
  s.accept_draft(a.get());
  EXPECT_EQ(a->computed, 6);
  s.check_invariants();
  a->tokens.resize(128, 1);
  a->computed = 127;
  EXPECT_EQ(s.plan().work[0].drafts, 0) << "the last page is for the token itself";
  s.remove(a.get());
  s.remove(b.get());
}

TEST(Scheduler, RandomTrafficEndsWithAllPagesBackAndNobodyStarved) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    testing::Pick pick(seed);
    const int64_t pages = pick(4, 20), batch = pick(1, 6);
    Scheduler s({.max_batch_size = batch,
                 .max_tokens_per_step = pick(batch, 40),
                 .prefill_tokens = pick(1, 40),
                 .prefill_tokens_beside_decodes = pick(1, 20),
                 .reuse_prefixes = seed % 3 > 0},
                pages);
    struct Job {
      std::unique_ptr<Sequence> seq;
      int64_t length;
    };
    std::list<Job> jobs;
    int64_t to_come = 30, ended = 0, cancelled = 0, oldest_idle = 0;
    for (int step = 0; to_come > 0 || !jobs.empty(); ++step) {
      ASSERT_LT(step, 100000) << seed;
      while (to_come > 0 && pick(0, 3) == 0) {
        const int64_t longest = pages * kv::kPageTokens, prompt = pick(1, longest - 1);
        jobs.push_back({sequence(prompt), prompt + pick(1, std::min<int64_t>(80, longest + 1 - prompt))});
        s.add(jobs.back().seq.get());
        --to_come;
      }
      StepPlan p = s.plan();
      ASSERT_EQ(p.work.empty(), jobs.empty());
      int64_t rows = 0;
      bool oldest_ran = false;
      for (const Work& w : p.work) {
        rows += w.tokens;
        oldest_ran |= w.seq == jobs.front().seq.get();
      }
      EXPECT_LE(rows, 40);
      // The oldest may have to share the prompt budget with nobody older, so it moves in every step.
      if (!jobs.empty()) oldest_idle = oldest_ran ? 0 : oldest_idle + 1;
      EXPECT_EQ(oldest_idle, 0) << seed;
      run(s, p);
      for (auto it = jobs.begin(); it != jobs.end();) {
        const bool done = int64_t(it->seq->tokens.size()) >= it->length, cancel = !done && pick(0, 200) == 0;
        if (done || cancel) {
          s.remove(it->seq.get());
          (done ? ended : cancelled) += 1;
          it = jobs.erase(it);
        } else {
          ++it;
        }
      }
      s.check_invariants();
    }
    EXPECT_EQ(ended + cancelled, 30);
    EXPECT_EQ(s.cache().free_pages(), pages);
  }
}

}  // namespace
}  // namespace mi::runtime
