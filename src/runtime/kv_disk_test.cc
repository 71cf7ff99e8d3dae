// The runtime with pages on disk below its cache: the same answers, less work, whatever the disk does; and the same
// answers when there are no pages at the worst moment.

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <mutex>

#include "runtime/bench_for_tests.h"
#include "runtime/generate.h"

namespace mi::runtime {
namespace {

using testing::Bench;
using testing::FakeStepper;
using testing::Recorder;

constexpr int64_t kPageBytes = kv::kPageTokens * 4;  // FakeStepper's

kv::StoreOptions options(const std::filesystem::path& dir, int64_t pages = 1000) {
  kv::StoreOptions o;
  o.file = {dir, 4096 + pages * (4096 + 512), kPageBytes, std::string(32, 'e'), {}};
  return o;
}
std::shared_ptr<kv::Store> open(const kv::StoreOptions& o) {
  auto s = kv::Store::open(o);
  MI_CHECK(s.ok(), "{}", s.error().message());
  return std::move(*s);
}

Request disk_request(uint64_t seed, int64_t prompt, int64_t max_tokens, std::string salt = "") {
  Request r;
  for (int64_t i = 0; i < prompt; ++i) r.prompt.push_back(int32_t(1 + random_u64(seed, uint64_t(i)) % 63));
  r.max_tokens = max_tokens;
  r.sampling.temperature = 0;
  r.cache_salt = std::move(salt);
  return r;
}

std::vector<int32_t> alone_without_disk(Request r) {
  Bench b({.pages = 200}, {.reuse_prefixes = false});
  Recorder& rec = b.add(std::move(r));
  b.run();
  return rec.tokens();
}

TEST(KvDisk, ALaterProcessTakesOverWhatAnEarlierOneComputed) {
  TempDir dir;
  std::vector<int32_t> said;
  {
    Bench b({.pages = 40}, {.kv_store = open(options(dir / "kv"))});
    Recorder& r = b.add(disk_request(1, 300, 100, "s"));
    b.run();
    said = r.tokens();
    EXPECT_EQ(r.finish().reused_tokens, 0);
    EXPECT_EQ(b.batcher.stats().kv_disk.pages, 6) << "399 of 400 tokens are computed: six whole pages";
    EXPECT_EQ(b.batcher.stats().kv_disk.misses, 4u);
    EXPECT_FALSE(b.batcher.unsaved());
  }
  EXPECT_EQ(said, alone_without_disk(disk_request(1, 300, 100)));
  Bench b({.pages = 40}, {.kv_store = open(options(dir / "kv"))});
  Recorder& same = b.add(disk_request(1, 300, 100, "s"));
  Request more = disk_request(1, 300, 30, "s");
  more.prompt.insert(more.prompt.end(), said.begin(), said.end());
  Request longer{.prompt = more.prompt};
  longer.sampling.temperature = 0;
  longer.max_tokens = 30;
  Recorder& next = b.add(std::move(more));
  Recorder& salted = b.add(disk_request(1, 300, 100, "another"));
  b.run();
  EXPECT_EQ(same.tokens(), said);
  EXPECT_EQ(same.finish().reused_tokens, 256);
  EXPECT_EQ(next.tokens(), alone_without_disk(std::move(longer)));
  EXPECT_GE(next.finish().reused_tokens, 256) << "from disk, or from the cache once the first one has it";
  EXPECT_EQ(salted.tokens(), said);
  EXPECT_EQ(salted.finish().reused_tokens, 0);
  EXPECT_GE(b.batcher.stats().kv_disk.hits, 6u);
  EXPECT_EQ(b.batcher.stats().reused_tokens, uint64_t(same.finish().reused_tokens + next.finish().reused_tokens));
}

// Prompts that take turns in a cache that holds one of them.
TEST(KvDisk, WhatMadeRoomComesBackFromDisk) {
  TempDir dir;
  std::vector<std::vector<int32_t>> want;
  for (uint64_t i = 0; i < 4; ++i) want.push_back(alone_without_disk(disk_request(i, 400, 20)));
  Bench b({.pages = 8}, {.kv_store = open(options(dir / "kv"))});
  for (int round = 0; round < 3; ++round) {
    for (uint64_t i = 0; i < 4; ++i) {
      Recorder& r = b.add(disk_request(i, 400, 20));
      b.run();
      EXPECT_EQ(r.tokens(), want[i]);
      EXPECT_EQ(r.finish().reused_tokens, round == 0 ? 0 : 384);
    }
  }
  EXPECT_EQ(b.batcher.stats().computed_tokens, 4u * 419 + 8u * 35);
  EXPECT_EQ(b.batcher.stats().kv_disk.dropped, 0u);
}

TEST(KvDisk, APreemptedSequenceGoesToDiskAndComesBack) {
  TempDir dir;
  uint64_t computed[2] = {};
  for (bool disk : {false, true}) {
    const auto store = disk ? open(options(dir / "kv")) : nullptr;
    Bench b({.pages = 7}, {.kv_store = store});
    Request slow = disk_request(1, 300, 60), urgent = disk_request(2, 420, 10);
    slow.priority = 1;
    b.add(std::move(slow));
    for (int i = 0; i < 20; ++i) b.step();
    while (store && store->writing() > 0) {  // what is not on disk yet is not found there
      store->wait(std::chrono::seconds(1));
      b.step();
    }
    b.add(std::move(urgent));  // needs every page
    b.run();
    EXPECT_EQ(b.batcher.stats().preemptions, 1u);
    EXPECT_EQ(b.recorders[0]->tokens(), alone_without_disk(disk_request(1, 300, 60)));
    EXPECT_EQ(b.recorders[1]->tokens(), alone_without_disk(disk_request(2, 420, 10)));
    EXPECT_EQ(b.recorders[0]->finish().reused_tokens, 0) << "its own pages are no reuse of its prompt";
    computed[disk] = b.batcher.stats().computed_tokens;
    if (disk) {
      const kv::StoreStats d = b.batcher.stats().kv_disk;
      EXPECT_GE(d.hits, 4u) << d.misses << " " << d.written << " " << d.dropped << " " << d.write_errors << " "
                            << d.read_errors;
    }
  }
  EXPECT_GT(computed[0], computed[1] + 3 * 64) << "four pages were whole; the steps before differ a little";
}

TEST(KvDisk, WhatIsUsedInMemoryStaysOnDisk) {
  TempDir dir;
  {
    Bench b({.pages = 60}, {.kv_store = open(options(dir / "kv", 12))});
    for (uint64_t i = 0; i < 10; ++i) {
      b.add(disk_request(99, 300, 1));
      b.run();
      b.add(disk_request(i, 200, 1));
      b.run();
    }
    EXPECT_EQ(b.batcher.stats().kv_disk.hits, 0u);
    EXPECT_GT(b.batcher.stats().kv_disk.replaced, 10u);
  }
  Bench b({.pages = 60}, {.kv_store = open(options(dir / "kv", 12))});
  Recorder& r = b.add(disk_request(99, 300, 1));
  b.run();
  EXPECT_EQ(r.finish().reused_tokens, 256);
}

TEST(KvDisk, DamagedPagesAreComputedAgain) {
  TempDir dir;
  const std::vector<int32_t> want = alone_without_disk(disk_request(1, 500, 10));
  {
    Bench b({.pages = 40}, {.kv_store = open(options(dir / "kv"))});
    b.add(disk_request(1, 500, 10));
    b.run();
  }
  {
    std::fstream f(dir / "kv" / "pages", std::ios::in | std::ios::out | std::ios::binary);
    f.seekp(3 * 4096 + 17);
    f.put('!');
  }
  for (int64_t reused : {3 * 64, 7 * 64}) {
    Bench b({.pages = 40}, {.kv_store = open(options(dir / "kv"))});
    Recorder& r = b.add(disk_request(1, 500, 10));
    b.run();
    EXPECT_EQ(r.tokens(), want);
    EXPECT_EQ(r.finish().reused_tokens, reused) << "the second time the page has been written again";
  }
}

TEST(KvDisk, SmallStoresFullDisksAndErrorsChangeNoAnswer) {
  std::vector<std::vector<int32_t>> want;
  const auto make = [](uint64_t i) {
    Request r = disk_request(i % 5, 60 + int64_t(i % 5) * 50, 40, i % 7 == 0 ? "s" : "");
    for (uint64_t k = 0; k < i * 13 % 90; ++k) r.prompt.push_back(int32_t(1 + random_u64(i, k) % 63));
    return r;
  };
  for (uint64_t i = 0; i < 24; ++i) want.push_back(alone_without_disk(make(i)));
  for (uint64_t seed = 0; seed < 12; ++seed) {
    TempDir dir;
    std::atomic<uint64_t> n{0};
    kv::StoreOptions so = options(dir / "kv", seed % 3 == 0 ? 3 : seed % 3 == 1 ? 12 : 1000);
    so.retry_seconds = 0;
    so.place_mask = seed % 2 ? ~uint64_t(0) : 0;
    so.buffer_bytes = 4 * kPageBytes;
    if (seed % 4 > 0)
      so.file.fault = [&n, seed](bool) { return random_u64(seed, n++) % 4 ? 0 : seed % 4 == 1 ? ENOSPC : EIO; };
    for (int life = 0; life < 3; ++life) {
      Bench b({.pages = 9}, {.max_batch_size = 5, .prefill_tokens = 100, .kv_store = open(so)});
      for (uint64_t i = 0; i < 24; ++i) {
        b.add(make(i));
        for (uint64_t k = random_u64(seed, i) % 6; k > 0; --k) b.step();
        if (i % 11 == 5) b.batcher.cancel(i);
      }
      b.run();
      for (uint64_t i = 0; i < 24; ++i) {
        const FinishEvent f = b.recorders[i]->finish();
        if (f.reason == FinishReason::kCancelled) continue;
        EXPECT_EQ(b.recorders[i]->tokens(), want[i]) << seed << " " << i;
      }
      EXPECT_EQ(b.batcher.stats().kv_pages_used, 0);
    }
  }
}

// A gate that the store's thread stands at.
struct Gate {
  std::mutex mu;
  std::condition_variable cv;
  bool closed = true;
  int waiting = 0;
  int pass() {
    std::unique_lock lock(mu);
    ++waiting;
    cv.notify_all();
    cv.wait(lock, [this] { return !closed; });
    --waiting;
    return 0;
  }
  void open() {
    std::lock_guard lock(mu);
    closed = false;
    cv.notify_all();
  }
};

TEST(KvDisk, OthersRunWhileASequenceWaitsAndADiskThatHangsIsNotWaitedForLong) {
  TempDir dir;
  {
    Bench b({.pages = 40}, {.kv_store = open(options(dir / "kv"))});
    b.add(disk_request(1, 300, 10));
    b.add(disk_request(2, 300, 10));
    b.run();
  }
  Gate gate;
  kv::StoreOptions so = options(dir / "kv");
  so.file.fault = [&gate](bool write) { return write ? 0 : gate.pass(); };
  Bench b({.pages = 40}, {.kv_store = open(so)});
  Recorder& waits = b.add(disk_request(1, 300, 10));
  Recorder& runs = b.add(disk_request(3, 300, 10));
  for (int i = 0; i < 20 && !runs.ended(); ++i) b.step();
  EXPECT_TRUE(runs.ended());
  EXPECT_TRUE(waits.tokens().empty());
  b.step();
  EXPECT_FALSE(waits.ended());
  b.now += 60;
  Recorder& later = b.add(disk_request(2, 300, 10));
  for (int i = 0; i < 30 && !(waits.ended() && later.ended()); ++i) b.step();
  EXPECT_EQ(waits.tokens(), alone_without_disk(disk_request(1, 300, 10)));
  EXPECT_EQ(waits.finish().reused_tokens, 0);
  EXPECT_EQ(later.tokens(), alone_without_disk(disk_request(2, 300, 10))) << "it does not wait at all";
  gate.open();
  b.run();
}

TEST(KvDisk, ACancelledSequenceLeavesNothingBehind) {
  TempDir dir;
  {
    Bench b({.pages = 40}, {.kv_store = open(options(dir / "kv"))});
    b.add(disk_request(1, 300, 10));
    b.run();
  }
  Gate gate;
  kv::StoreOptions so = options(dir / "kv");
  so.file.fault = [&gate](bool write) { return write ? 0 : gate.pass(); };
  Bench b({.pages = 6}, {.kv_store = open(so)});
  Recorder& gone = b.add(disk_request(1, 300, 10));
  b.step();
  b.batcher.cancel(1);
  Recorder& other = b.add(disk_request(5, 300, 10));  // takes the pages that the reads were for
  for (int i = 0; i < 5; ++i) b.step();
  gate.open();
  b.run();
  EXPECT_EQ(gone.finish().reason, FinishReason::kCancelled);
  EXPECT_EQ(other.tokens(), alone_without_disk(disk_request(5, 300, 10)));
}

TEST(KvDisk, DrainingWritesAllThatIsWholeAndAnIdleLoopToo) {
  TempDir dir;
  const auto many = [] {
    std::vector<Request> r;
    for (uint64_t i = 0; i < 12; ++i) r.push_back(disk_request(i, 200, 20));
    return r;
  };
  kv::StoreOptions so = options(dir / "kv");
  so.buffer_bytes = 4 * kPageBytes;  // two pages on their way at most
  {
    EngineLoop loop(std::make_unique<FakeStepper>(FakeStepper::Config{.pages = 100}), nullptr, {.kv_store = open(so)});
    ASSERT_TRUE(generate(loop, many()).ok());
    EXPECT_TRUE(loop.drain(std::chrono::seconds(60)));
    EXPECT_EQ(loop.stats().kv_disk.pages, 36);
    EXPECT_EQ(loop.stats().kv_disk.written, 36u);
  }
  EngineLoop loop(std::make_unique<FakeStepper>(FakeStepper::Config{.pages = 100}), nullptr, {.kv_store = open(so)});
  auto out = generate(loop, many());
  ASSERT_TRUE(out.ok());
  for (uint64_t i = 0; i < 12; ++i) {
    EXPECT_EQ((*out)[i].tokens, alone_without_disk(disk_request(i, 200, 20)));
    EXPECT_EQ((*out)[i].finish.reused_tokens, 192);
  }
}

// Every request for pages of a mixed load is refused once, with and without a disk below.
TEST(KvDisk, AnAllocationThatFailsAtAnyPointChangesNoAnswer) {
  const auto make = [](uint64_t i) {
    Request r = disk_request(i % 3, 50 + int64_t(i % 3) * 60, 30 + int64_t(i % 8) * 14);
    r.priority = int64_t(i % 4) / 3;
    if (i % 4 == 2) r.sampling.temperature = 1, r.sampling.seed = i;
    if (i == 5) r.prompt_logprobs = true;
    return r;
  };
  std::vector<std::vector<int32_t>> want;
  for (uint64_t i = 0; i < 14; ++i) want.push_back(alone_without_disk(make(i)));
  for (bool disk : {false, true}) {
    for (int64_t drafts : {0, 3}) {
      int64_t asked = 0, refused = 0;  // 0: none
      for (; asked >= refused; ++refused) {
        TempDir dir;
        asked = 0;
        LoopOptions o{.max_batch_size = 4, .prefill_tokens = 70, .draft_tokens = drafts};
        o.refuse_pages = [&] { return ++asked == refused; };
        if (disk) o.kv_store = open(options(dir / "kv", 30));
        Bench b({.pages = 7}, std::move(o));
        for (uint64_t i = 0; i < 14; ++i) {
          b.add(make(i));
          b.step();
        }
        b.run();
        for (uint64_t i = 0; i < 14; ++i) {
          EXPECT_EQ(b.recorders[i]->tokens(), want[i]) << refused << " " << i;
          EXPECT_EQ(b.recorders[i]->finish().reason, FinishReason::kLength);
        }
        EXPECT_EQ(b.batcher.stats().kv_pages_used, 0);
      }
      EXPECT_GT(refused, 30) << "the last one came too late to refuse anything";
    }
  }
}

}  // namespace
}  // namespace mi::runtime
