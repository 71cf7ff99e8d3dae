#include "exec/expert_stream.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <numeric>

#include "base/temp_dir.h"
#include "exec/test_model.h"

namespace mi::exec {
namespace {


// Two groups of experts whose bytes tell who they are: the second has two matrices, of sizes and places that are no
// multiples of a page, and the last one ends with the file.
struct Weights {
  TempDir dir;
  std::filesystem::path file = dir / "weights.bin";
  std::vector<ExpertStream::Group> groups = {{5, 2, {{4096, 8192, 8192}}}, {3, 1, {{46000, 5000, 4900}, {62000, 64, 64}}}};
  std::vector<std::byte> bytes;

  Weights() {
    for (uint64_t i = 0; i < 62000 + 3 * 64; ++i) bytes.push_back(std::byte(random_u64(1, i)));
    std::ofstream(file, std::ios::binary).write(reinterpret_cast<const char*>(bytes.data()), std::streamsize(bytes.size()));
  }
  std::unique_ptr<ExpertStream> open(int64_t cache) const {
    auto s = ExpertStream::open(file, groups, cache);
    MI_CHECK(s.ok(), "{}", s.error().message());
    return std::move(s).value();
  }
  // Runs a step's instruction; how many experts came in each part.
  std::vector<size_t> want(ExpertStream& s, size_t group, const std::vector<int32_t>& experts) const {
    std::vector<size_t> parts;
    std::vector<int32_t> seen;
    s.each_part(group, experts, [&](std::span<const int32_t> part) {
      parts.push_back(part.size());
      for (const int32_t e : part) {
        seen.push_back(e);
        for (size_t m = 0; m < groups[group].matrices.size(); ++m) {
          const artifact::ExpertMatrix& x = groups[group].matrices[m];
          const std::vector<int32_t>& places = groups[group].places;
          EXPECT_EQ(std::memcmp(s.at(group, e, m), &bytes[size_t(x.offset + (places.empty() ? e : places[size_t(e)]) * x.stride)], size_t(x.bytes)), 0) << group << ", " << e << ", " << m;
        }
      }
    });
    std::sort(seen.begin(), seen.end());
    EXPECT_EQ(seen, experts) << "each once";
    return parts;
  }
  // About half of the group's experts, others in each step.
  std::vector<int32_t> some(size_t group, uint64_t seed, uint64_t step) const {
    std::vector<int32_t> experts;
    for (int32_t e = 0; e < groups[group].experts; ++e)
      if (random_u64(seed, step * 8 + uint64_t(e)) % 2) experts.push_back(e);
    return experts;
  }
};

constexpr int64_t kSmall = 8192, kLarge = 3 * 4096 + 2 * 4096;   // slots of the two groups
constexpr int64_t kAll = 5 * kSmall + 3 * kLarge;

TEST(ExpertStream, TheRightBytesWithRoomForAnyNumber) {
  const Weights w;
  for (const int64_t cache : {kSmall + kLarge, kSmall + kLarge + 20000, kAll, 10 * kAll}) {
    const auto s = w.open(cache);
    EXPECT_LE(s->memory().bytes(), cache);
    for (uint64_t step = 0; step < 200; ++step) {
      const size_t group = step % 2;
      w.want(*s, group, w.some(group, 2, step));
      const int32_t next[] = {int32_t(step % 3), int32_t((step + 1) % 3)};
      const size_t other[] = {1 - group};
      s->prefetch(other, next);
    }
    const StreamStats stats = s->stats();
    EXPECT_EQ(stats.experts, 8);
    EXPECT_EQ(stats.held, cache >= kAll ? 8 : stats.held);
    if (cache >= kAll) {
      EXPECT_LE(stats.misses, 8);
      EXPECT_LE(stats.bytes_read, kAll) << "nothing is read twice";
    }
  }
}

TEST(ExpertStream, ExpertsInAnotherOrder) {
  Weights w;
  w.groups[0].places = {3, 0, 4, 1, 2};
  w.groups[1].places = {2, 1, 0};
  for (const int64_t cache : {kSmall + kLarge, kAll / 2, kAll}) {
    const auto s = w.open(cache);
    for (uint64_t step = 0; step < 100; ++step) {
      const size_t group = step % 2;
      w.want(*s, group, w.some(group, 4, step));
    }
  }
}

TEST(ExpertStream, NeighboursAreOneRead) {
  Weights w;
  const auto reads = [&](size_t group, const std::vector<int32_t>& experts) {
    const auto s = w.open(kAll);
    w.want(*s, group, experts);
    return std::pair(s->stats().reads, s->stats().bytes_read);
  };
  EXPECT_EQ(reads(0, {1, 2}), std::pair(int64_t(1), int64_t(4 * 4096)));
  EXPECT_EQ(reads(0, {0, 2}), std::pair(int64_t(2), int64_t(4 * 4096)));
  EXPECT_EQ(reads(0, {0, 1, 3, 4}).first, 2);
  EXPECT_EQ(reads(1, {0, 1, 2}), std::pair(int64_t(2), int64_t(5 * 4096))) << "a read for each of its matrices; pages that two share are read once";
  w.groups[0].places = {3, 0, 4, 1, 2};
  EXPECT_EQ(reads(0, {0, 2}).first, 1);
  EXPECT_EQ(reads(0, {1, 2}).first, 2);
}

TEST(ExpertStream, LargeExpertsAreReadInParts) {
  const TempDir dir;
  const std::filesystem::path file = dir / "weights.bin";
  { std::ofstream(file) << ""; }
  std::filesystem::resize_file(file, (4 << 20) + 64);
  auto s = ExpertStream::open(file, {{4, 2, {{64, 1 << 20, 1 << 20}}}}, 8 << 20);
  ASSERT_TRUE(s.ok());
  const int32_t both[] = {1, 2};
  (*s)->each_part(0, both, [](std::span<const int32_t>) {});
  EXPECT_EQ((*s)->stats().reads, 2 * 3) << "a MB and a page each; nothing is gained by reading them together";
}

TEST(ExpertStream, WhatWasUsedLastStaysAndSoDoesWhatIsChosenOften) {
  const Weights w;
  const int64_t for_three = kSmall + kLarge + (kAll - kSmall - kLarge) * 5 / 8;   // of five small ones
  const auto hits = [&](ExpertStream& s, int32_t e) {
    const int64_t before = s.stats().hits;
    w.want(s, 0, {e});
    return s.stats().hits > before;
  };
  {
    const auto s = w.open(for_three);
    for (const int32_t e : {0, 1, 2, 0, 3}) w.want(*s, 0, {e});
    EXPECT_TRUE(hits(*s, 0));
    EXPECT_TRUE(hits(*s, 2));
    EXPECT_FALSE(hits(*s, 1)) << "used longest ago, so it made room for 3";
  }
  const auto s = w.open(for_three);
  const float chances[] = {0.1f, 0.9f, 0.1f, 0.1f, 0.1f};
  s->set_prior(0, chances);
  for (const int32_t e : {1, 0, 2, 0, 3}) w.want(*s, 0, {e});
  EXPECT_TRUE(hits(*s, 1)) << "nearly every token chooses it";
  const auto full = w.open(for_three);
  full->set_prior(0, chances);
  full->fill();
  EXPECT_TRUE(hits(*full, 1)) << "read beforehand";
  EXPECT_FALSE(hits(*full, 4));
}

TEST(ExpertStream, ReadsAheadAndCountsWhatThatWasWorth) {
  const Weights w;
  const auto s = w.open(kAll);
  const int32_t ahead[] = {4};
  const size_t group[] = {0};
  s->prefetch(group, ahead);
  w.want(*s, 0, {1, 4});
  EXPECT_EQ(s->stats().prefetched, 1);
  EXPECT_EQ(s->stats().prefetch_used, 1);
  w.want(*s, 0, {4});
  EXPECT_EQ(s->stats().prefetch_used, 1);
}

TEST(ExpertStream, ReadsAheadOnlyWhileThatIsRight) {
  const TempDir dir;
  const std::filesystem::path file = dir / "weights.bin";
  { std::ofstream(file) << ""; }
  std::filesystem::resize_file(file, 64 * 4096);
  auto s = ExpertStream::open(file, {{64, 1, {{0, 4096, 4096}}}}, 16 * 4096);
  ASSERT_TRUE(s.ok());
  const size_t group[] = {0};
  const auto share_of_steps = [&](bool right) {
    int pays = 0;
    for (int32_t step = 0; step < 320; ++step) {
      const int32_t want[] = {step * 5 % 32}, ahead[] = {right ? (step + 1) * 5 % 32 : 32 + step * 5 % 32};
      (*s)->each_part(0, want, [](std::span<const int32_t>) {});
      pays += (*s)->ahead_pays();
      if ((*s)->ahead_pays()) (*s)->prefetch(group, ahead);
    }
    return double(pays) / 320;
  };
  EXPECT_LT(share_of_steps(false), 0.1) << "it only tries now and then";
  for (int i = 0; i < 8; ++i) share_of_steps(true);  // learnt from one try in sixteen steps
  EXPECT_EQ(share_of_steps(true), 1);
  share_of_steps(false);
  EXPECT_LT(share_of_steps(false), 0.3);
}

TEST(ExpertStream, RefusesACacheWithoutRoomAndAMissingFile) {
  const Weights w;
  auto s = ExpertStream::open(w.file, w.groups, kSmall + kLarge - 1);
  ASSERT_FALSE(s.ok());
  EXPECT_EQ(s.error().code(), ErrorCode::kUsage);
  EXPECT_NE(s.error().message().find("one expert of each size: 28.67 kB are the least"), std::string::npos) << s.error().message();
  EXPECT_FALSE(ExpertStream::open(w.dir / "none", w.groups, kAll).ok());
}

TEST(ExpertStreamDeathTest, AFileThatWasCutEndsTheProgramWithASentence) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const Weights w;
  std::filesystem::resize_file(w.file, 50000);
  EXPECT_EXIT(w.want(*w.open(kAll), 1, {2}), ::testing::ExitedWithCode(3), "weights.bin: cannot be read at byte .*it ends early");
}

}  // namespace
}  // namespace mi::exec
