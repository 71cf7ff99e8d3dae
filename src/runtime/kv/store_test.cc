#include "runtime/kv/store.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>

#include "base/util.h"
#include "runtime/testing.h"

namespace mi::runtime::kv {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kBytes = 5000;  // a page; a slot has 8192
constexpr int64_t kSlot = 8192, kEntry = 512, kHead = 4096;

StoreOptions options(const fs::path& dir, int64_t slots, std::string identity = std::string(32, 'e')) {
  StoreOptions o;
  o.file = {dir, kHead + slots * (kSlot + kEntry), kBytes, std::move(identity), {}};
  return o;
}
std::unique_ptr<Store> open(const StoreOptions& o) {
  auto s = Store::open(o);
  MI_CHECK(s.ok(), "{}", s.error().message());
  (*s)->check_invariants();
  return std::move(*s);
}

using Tokens = std::vector<int32_t>;
Tokens text(int64_t pages, int32_t kind = 0) {
  Tokens t;
  for (int64_t i = 0; i < pages * kPageTokens; ++i) t.push_back(int32_t(i) + 1000 * kind);
  return t;
}
std::span<const int32_t> page_of(const Tokens& t, int64_t i) {
  return std::span(t).subspan(size_t(i * kPageTokens), size_t(kPageTokens));
}
// What a page with these tokens up to its end holds: a function of all of them and the salt.
std::vector<std::byte> content(std::string_view salt, std::span<const int32_t> until) {
  uint64_t h = seed_of(1, salt);
  for (int32_t t : until) h = random_u64(h, uint64_t(t));
  std::vector<std::byte> c;
  for (int64_t i = 0; i < kBytes; ++i) c.push_back(std::byte(random_u64(h, uint64_t(i))));
  return c;
}

void settle(Store& s) {
  while (s.writing() + s.reading() > 0) {
    s.wait(std::chrono::milliseconds(100));
    s.collect([](uint64_t, std::span<const std::byte>) {});
  }
  s.check_invariants();
}
// Puts the pages of the text into the store; false where one found no room.
bool put(Store& s, std::string_view salt, const Tokens& t) {
  RecordId above;
  for (int64_t i = 0; i < int64_t(t.size()) / kPageTokens; ++i) {
    RecordId id = s.find(above, salt, page_of(t, i));
    if (id.none()) {
      if (!s.can_write()) settle(s);
      if (!s.can_write()) return false;
      id = s.write(above, salt, page_of(t, i), [&](std::span<std::byte> to) {
        std::ranges::copy(content(salt, std::span(t).first(size_t((i + 1) * kPageTokens))), to.begin());
      });
    }
    if (id.none()) return false;
    above = id;
  }
  return true;
}
// How many pages of the text come back; each has to be what was put.
int64_t take(Store& s, std::string_view salt, const Tokens& t) {
  const auto ids = s.match(salt, t, int64_t(t.size()) / kPageTokens);
  int64_t whole = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (s.read(ids[i]) == 0) break;
    bool lost = false;
    while (s.reading() > 0) {
      s.wait(std::chrono::milliseconds(100));
      s.collect([&](uint64_t, std::span<const std::byte> data) {
        lost = data.empty();
        if (!lost) {
          EXPECT_TRUE(std::ranges::equal(data, content(salt, std::span(t).first((i + 1) * size_t(kPageTokens)))));
        }
      });
    }
    if (lost) break;
    ++whole;
  }
  s.check_invariants();
  return whole;
}
std::string bytes(const fs::path& p) {
  std::ifstream in(p, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void flip(const fs::path& p, int64_t at) {
  std::fstream f(p, std::ios::in | std::ios::out | std::ios::binary);
  f.seekg(at);
  const int c = f.get();
  f.seekp(at);
  f.put(char(c ^ 0x10));
}

TEST(KvStore, PagesComeBackAlsoAfterARestart) {
  TempDir dir;
  const Tokens a = text(3), b = text(2, 7);
  {
    auto s = open(options(dir / "kv", 10));
    EXPECT_EQ(s->capacity(), 10);
    ASSERT_TRUE(put(*s, "the tenant's secret", a) && put(*s, "", b));
    EXPECT_EQ(s->match("", b, 2).size(), 0u) << "what is not written yet can't be read";
    settle(*s);
    EXPECT_EQ(take(*s, "the tenant's secret", a), 3);
    EXPECT_EQ(take(*s, "", b), 2);
    ASSERT_TRUE(put(*s, "", text(3, 7)));  // the destructor writes what it was given
    const StoreStats t = s->stats();
    EXPECT_EQ(t.pages, 6);
    EXPECT_EQ(t.bytes, 6 * kSlot);
    EXPECT_EQ(t.hits, 5u);
    EXPECT_EQ(t.written, 5u);
  }
  auto s = open(options(dir / "kv", 10));
  EXPECT_EQ(take(*s, "the tenant's secret", a), 3);
  EXPECT_EQ(take(*s, "", text(3, 7)), 3);
  EXPECT_EQ(take(*s, "", a), 0) << "another salt";
  EXPECT_EQ(take(*s, "the tenant's secret", b), 0);
  Tokens other = a;
  other[70] = 5;
  EXPECT_EQ(take(*s, "the tenant's secret", other), 1);
  for (const char* file : {"index", "pages"}) {
    EXPECT_EQ(bytes(dir / "kv" / file).find("secret"), std::string::npos);
    struct stat st {};
    ASSERT_EQ(::stat((dir / "kv" / file).c_str(), &st), 0);
    EXPECT_EQ(st.st_mode & 0777, 0600u);
  }
}

TEST(KvStore, EqualHashesAreNotEqualPages) {
  TempDir dir;
  StoreOptions o = options(dir / "kv", 20);
  o.place_mask = 0;
  {
    auto s = open(o);
    ASSERT_TRUE(put(*s, "a", text(2)) && put(*s, "b", text(2)) && put(*s, "a", text(2, 1)));
    settle(*s);
    EXPECT_EQ(s->stats().pages, 6);
    EXPECT_EQ(take(*s, "a", text(2, 2)), 0);
    EXPECT_EQ(take(*s, "c", text(2)), 0);
  }
  auto s = open(o);
  EXPECT_EQ(take(*s, "a", text(2)), 2);
  EXPECT_EQ(take(*s, "b", text(2)), 2);
  EXPECT_EQ(take(*s, "a", text(2, 1)), 2);
  EXPECT_EQ(take(*s, "b", text(2, 1)), 0);
}

// The second page of one text and of another have the same tokens: what stands before them tells them apart.
TEST(KvStore, EqualPagesBehindOthersAreOthers) {
  TempDir dir;
  Tokens a = text(2), b = text(2);
  b[0] = 77;
  for (bool again : {false, true}) {
    auto s = open(options(dir / "kv", 8));
    if (!again) {
      ASSERT_TRUE(put(*s, "", a));
      settle(*s);
    }
    EXPECT_EQ(take(*s, "", b), 0);
    if (again) {
      ASSERT_TRUE(put(*s, "", b));
      settle(*s);
      EXPECT_EQ(take(*s, "", b), 2);
    }
    EXPECT_EQ(take(*s, "", a), 2);
  }
}

TEST(KvStore, AFlippedByteLosesAPageAndMakesNoneWrong) {
  TempDir dir;
  const Tokens a = text(3), b = text(3, 1);
  {
    auto s = open(options(dir / "kv", 6));
    ASSERT_TRUE(put(*s, "x", a) && put(*s, "", b));
  }
  const auto pages_at = [&](int64_t at) { return at % kSlot < kBytes; };
  const auto try_all = [&](const char* file, int64_t size, int64_t step, const auto& matters) {
    for (int64_t at = 0; at < size; at += step) {
      flip(dir / "kv" / file, at);
      fs::copy(dir / "kv", dir / "copy", fs::copy_options::recursive);
      flip(dir / "kv" / file, at);
      {
        auto r = Store::open(options(dir / "copy", 6));
        if (r.ok()) {
          const int64_t whole = take(**r, "x", a) + take(**r, "", b);
          EXPECT_EQ(whole < 6, matters(at)) << file << " " << at;
        } else {
          EXPECT_LT(at, 8) << "only without its first word it is not known for a store: " << r.error().message();
        }
      }
      fs::remove_all(dir / "copy");
    }
  };
  try_all("pages", 6 * kSlot, 1597, pages_at);
  const auto entry_at = [&](int64_t at) { return at < kHead ? at < 104 : (at - kHead) % kEntry < 392; };
  try_all("index", 120, 3, entry_at);
  try_all("index", kHead + 6 * kEntry, 53, entry_at);
}

TEST(KvStore, ShortenedFilesLosePagesOnly) {
  TempDir dir;
  {
    auto s = open(options(dir / "kv", 6));
    ASSERT_TRUE(put(*s, "", text(6)));
  }
  for (const char* file : {"pages", "index"}) {
    const int64_t size = int64_t(fs::file_size(dir / "kv" / file));
    for (int64_t keep = 1; keep < size; keep += size / 23) {
      fs::copy(dir / "kv", dir / "copy", fs::copy_options::recursive);
      fs::resize_file(dir / "copy" / file, uintmax_t(keep));
      {
        auto s = open(options(dir / "copy", 6));
        const int64_t whole = take(*s, "", text(6));
        EXPECT_LT(whole, 6);
        if (std::string(file) == "pages") {
          EXPECT_EQ(whole, std::min<int64_t>((keep + kSlot - kBytes) / kSlot, 5)) << keep;
        }
        ASSERT_TRUE(put(*s, "", text(6)));
        settle(*s);
        EXPECT_EQ(take(*s, "", text(6)), 6) << file << " " << keep;
      }
      fs::remove_all(dir / "copy");
    }
  }
}

// kill -9 leaves what was written so far: any copy of the files taken meanwhile.
TEST(KvStore, WhatIsThereWhileItIsWrittenIsNeverWrong) {
  TempDir dir;
  StoreOptions o = options(dir / "kv", 8);
  int64_t found = 0;
  {
    auto s = open(o);
    for (int32_t round = 0; round < 60; ++round) {
      put(*s, "", text(3, round % 7));
      fs::copy(dir / "kv", dir / "copy", fs::copy_options::recursive);
      {
        auto c = open(options(dir / "copy", 8));
        for (int32_t kind = 0; kind < 7; ++kind) found += take(*c, "", text(3, kind));
      }
      fs::remove_all(dir / "copy");
      s->collect([](uint64_t, std::span<const std::byte>) {});
    }
    settle(*s);
    EXPECT_GT(s->stats().replaced, 0u);
  }
  EXPECT_GT(found, 60);
}

TEST(KvStore, AnotherEngineStartsAfresh) {
  TempDir dir;
  std::vector<std::string> said;
  StoreOptions o = options(dir / "kv", 4);
  o.say = [&](const std::string& line) { said.push_back(line); };
  {
    auto s = open(o);
    ASSERT_TRUE(put(*s, "", text(2)));
  }
  EXPECT_TRUE(said.empty());
  o.file.identity = std::string(32, 'f');
  {
    auto s = open(o);
    ASSERT_EQ(said.size(), 1u);
    EXPECT_NE(said[0].find("another engine"), std::string::npos) << said[0];
    EXPECT_EQ(take(*s, "", text(2)), 0);
    EXPECT_EQ(fs::file_size(dir / "kv" / "pages"), 0u);
    ASSERT_TRUE(put(*s, "", text(1)));
  }
  o.file.page_bytes = 4000;
  {
    auto s = open(o);
    EXPECT_EQ(said.size(), 2u);
    EXPECT_EQ(s->stats().pages, 0);
  }
}

TEST(KvStore, FoldersThatCannotBeUsedAreRefusedByName) {
  TempDir dir;
  const auto message = [](const StoreOptions& o) {
    auto s = Store::open(o);
    return s.ok() ? std::string() : s.error().message();
  };
  auto s = open(options(dir / "kv", 4));
  EXPECT_NE(message(options(dir / "kv", 4)).find("in use by another process"), std::string::npos);
  s.reset();
  EXPECT_EQ(message(options(dir / "kv", 4)), "");
  EXPECT_NE(message(options(dir / "no" / "kv", 4)).find("can't be made"), std::string::npos);
  EXPECT_NE(message(options(dir / "kv", 0)).find("too little"), std::string::npos);
  fs::create_directory(dir / "mine");
  std::ofstream(dir / "mine" / "index") << "my own index of things";
  EXPECT_NE(message(options(dir / "mine", 4)).find("no store"), std::string::npos);
  EXPECT_EQ(bytes(dir / "mine" / "index"), "my own index of things");
  fs::create_directory(dir / "pages");
  std::ofstream(dir / "pages" / "pages") << "my own pages";
  EXPECT_NE(message(options(dir / "pages", 4)).find("no store"), std::string::npos);
  EXPECT_EQ(bytes(dir / "pages" / "pages"), "my own pages");
  fs::create_directories(dir / "odd" / "lock");
  EXPECT_NE(message(options(dir / "odd", 4)), "");
  std::ofstream(dir / "file") << "x";
  EXPECT_NE(message(options(dir / "file", 4)).find("not a folder"), std::string::npos);
  // An engine's, say. Nothing may be left in it either.
  fs::create_directory(dir / "engine");
  std::ofstream(dir / "engine" / "weights.bin") << "x";
  EXPECT_NE(message(options(dir / "engine", 4)).find("other files (weights.bin)"), std::string::npos);
  EXPECT_EQ(std::distance(fs::directory_iterator(dir / "engine"), fs::directory_iterator()), 1);
  fs::create_directories(dir / "disk" / "lost+found");
  EXPECT_EQ(message(options(dir / "disk", 4)), "");
}

TEST(KvStore, TheLeastRecentlyUsedMakesRoomFromItsEnd) {
  TempDir dir;
  auto s = open(options(dir / "kv", 5));
  ASSERT_TRUE(put(*s, "", text(3, 1)) && put(*s, "", text(2, 2)));
  settle(*s);
  EXPECT_EQ(take(*s, "", text(3, 1)), 3);  // used last
  ASSERT_TRUE(put(*s, "", text(1, 3)));
  settle(*s);
  EXPECT_EQ(take(*s, "", text(2, 2)), 1);
  EXPECT_EQ(take(*s, "", text(3, 1)), 3);
  ASSERT_TRUE(put(*s, "", text(2, 4)));
  settle(*s);
  EXPECT_EQ(take(*s, "", text(3, 1)), 3);
  EXPECT_EQ(take(*s, "", text(2, 2)) + take(*s, "", text(1, 3)), 0);
  EXPECT_EQ(s->stats().replaced, 3u);
  // One that needs all the room for itself stops where only the pages before it could go.
  EXPECT_FALSE(put(*s, "", text(9, 5)));
  settle(*s);
  EXPECT_EQ(take(*s, "", text(9, 5)), 5);
  EXPECT_EQ(s->stats().pages, 5);
}

TEST(KvStore, FewerBytesKeepWhatFitsAndTheFilesShrink) {
  TempDir dir;
  {
    auto s = open(options(dir / "kv", 8));
    ASSERT_TRUE(put(*s, "", text(8)));
  }
  {
    auto s = open(options(dir / "kv", 5));
    EXPECT_EQ(take(*s, "", text(8)), 5);
    EXPECT_LE(int64_t(fs::file_size(dir / "kv" / "pages") + fs::file_size(dir / "kv" / "index")),
              kHead + 5 * (kSlot + kEntry));
  }
  auto s = open(options(dir / "kv", 12));
  EXPECT_EQ(take(*s, "", text(8)), 5);
  ASSERT_TRUE(put(*s, "", text(12)));
  settle(*s);
  EXPECT_EQ(take(*s, "", text(12)), 12);
}

TEST(KvStore, AFullDiskIsSaidOnceAndPagesAreReplacedInsteadOfAdded) {
  TempDir dir;
  std::atomic<int> error{0};
  std::vector<std::string> said;
  StoreOptions o = options(dir / "kv", 6);
  o.file.fault = [&](bool write) { return write ? error.load() : 0; };
  o.say = [&](const std::string& line) { said.push_back(line); };
  o.retry_seconds = 3600;
  auto s = open(o);
  ASSERT_TRUE(put(*s, "", text(2, 1)));
  settle(*s);
  error = ENOSPC;
  put(*s, "", text(2, 2));
  settle(*s);
  error = 0;
  EXPECT_EQ(take(*s, "", text(2, 2)), 0);
  EXPECT_EQ(take(*s, "", text(2, 1)), 2) << "pages are found all the time";
  EXPECT_EQ(s->stats().write_errors, 2u);
  EXPECT_TRUE(s->stats().quiet);
  ASSERT_EQ(said.size(), 1u);
  EXPECT_NE(said[0].find("No space left"), std::string::npos) << said[0];
  EXPECT_NE(said[0].find("replaced instead of added"), std::string::npos) << said[0];
  ASSERT_TRUE(put(*s, "", text(1, 3)));
  settle(*s);
  EXPECT_EQ(take(*s, "", text(1, 3)), 1);
  EXPECT_EQ(s->stats().pages, 2) << "four slots have never been written and wait for room";
  EXPECT_EQ(said.size(), 1u);
}

TEST(KvStore, AfterAFailedWriteItIsQuietAndTriesAgain) {
  TempDir dir;
  std::atomic<int> error{0};
  std::vector<std::string> said;
  StoreOptions o = options(dir / "kv", 6);
  o.file.fault = [&](bool write) { return write ? error.load() : 0; };
  o.say = [&](const std::string& line) { said.push_back(line); };
  for (double retry : {3600.0, 0.0}) {
    o.retry_seconds = retry;
    said.clear();
    auto s = open(o);
    ASSERT_TRUE(put(*s, "", text(2)));
    settle(*s);
    error = EIO;
    put(*s, "", text(5));  // the fourth hangs below the third, which is lost, and so is it
    settle(*s);
    EXPECT_EQ(s->stats().pages, 2);
    EXPECT_EQ(take(*s, "", text(5)), 2);
    error = 0;
    EXPECT_EQ(s->can_write(), retry == 0);
    EXPECT_EQ(said.size(), 1u);
    if (retry == 0) {
      ASSERT_TRUE(put(*s, "", text(5)));
      settle(*s);
      EXPECT_EQ(take(*s, "", text(5)), 5);
      ASSERT_EQ(said.size(), 2u);
      EXPECT_NE(said[1].find("written again"), std::string::npos);
    }
  }
}

TEST(KvStore, AFileThatMayNotGrowStopsNothing) {
  TempDir dir;
  signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  const rlimit small{rlim_t(3 * kSlot + 100), old.rlim_max};
  auto s = open(options(dir / "kv", 8));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  put(*s, "", text(6));
  settle(*s);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old), 0);
  EXPECT_EQ(take(*s, "", text(6)), 3);
  EXPECT_EQ(s->stats().write_errors, 3u);
  s.reset();
  auto again = open(options(dir / "kv", 8));
  EXPECT_EQ(take(*again, "", text(6)), 3);
}

TEST(KvStore, NoRoomForTheVeryFirstPageIsNoReasonToRefuse) {
  TempDir dir;
  std::atomic<int> error{ENOSPC};
  StoreOptions o = options(dir / "kv", 4);
  o.file.fault = [&](bool write) { return write ? error.load() : 0; };
  o.retry_seconds = 0;
  auto s = open(o);
  put(*s, "", text(1));
  settle(*s);
  EXPECT_EQ(s->stats().pages, 0);
  error = 0;
  ASSERT_TRUE(put(*s, "", text(2)));
  settle(*s);
  EXPECT_EQ(take(*s, "", text(2)), 2);
}

TEST(KvStore, UnreadablePagesAreForgottenWithWhatIsBehindThem) {
  TempDir dir;
  std::atomic<int> error{0};
  StoreOptions o = options(dir / "kv", 8);
  o.file.fault = [&](bool write) { return write ? 0 : error.load(); };
  auto s = open(o);
  ASSERT_TRUE(put(*s, "", text(4)) && put(*s, "", text(1, 1)));
  settle(*s);
  error = EIO;
  EXPECT_EQ(take(*s, "", text(4)), 0);
  error = 0;
  EXPECT_EQ(s->stats().pages, 1);
  EXPECT_EQ(s->stats().read_errors, 1u);
  EXPECT_EQ(take(*s, "", text(4)), 0);
  EXPECT_EQ(take(*s, "", text(1, 1)), 1);
  ASSERT_TRUE(put(*s, "", text(4)));
  settle(*s);
  EXPECT_EQ(take(*s, "", text(4)), 4);
}

// Entries that no store writes, with checksums that are right: parents that are missing, behind their children, or
// themselves.
TEST(KvStore, EntriesThatMakeNoTreeAreLeftOut) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    testing::Pick pick(seed);
    TempDir dir;
    const StoreOptions o = options(dir / "kv", 12);
    {
      std::vector<std::pair<int64_t, Record>> found;
      std::string note;
      auto f = StoreFile::open(o.file, &found, &note);
      ASSERT_TRUE(f.ok());
      for (int64_t slot = 0; slot < 12; ++slot) {
        Record r;
        r.id = {1, uint64_t(pick(1, 9))};
        if (pick(0, 2) > 0) r.parent = {1, uint64_t(pick(1, 9))};
        r.order = uint64_t(pick(1, 9));
        r.tokens.fill(int32_t(pick(0, 1)));
        if (pick(0, 1)) r.salt = f->digest("");
        ASSERT_EQ(f->write(slot, r, std::vector<std::byte>(size_t(kBytes))), 0);
      }
    }
    auto s = open(o);
    for (int i = 0; i < 8; ++i) {
      Tokens t;
      for (int64_t blocks = 0; blocks < 3; ++blocks) t.resize(t.size() + 64, int32_t(i >> blocks & 1));
      for (const RecordId& id : s->match("", t, 3)) {
        ASSERT_NE(s->read(id), 0u);
        settle(*s);
      }
      put(*s, "", t);
      settle(*s);
    }
    EXPECT_EQ(s->stats().read_errors, 0u);
  }
}

// Few different pages, little room, errors, other hashes, restarts: whatever comes back is what was put (take()
// compares).
TEST(KvStore, RandomUseNeverGivesAnotherPage) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    testing::Pick pick(seed);
    TempDir dir;
    std::atomic<int> error{0};
    StoreOptions o = options(dir / "kv", pick(1, 12));
    o.place_mask = seed % 2 ? ~uint64_t(0) : 0;
    o.retry_seconds = 0;
    o.file.fault = [&](bool) { return error.load(); };
    auto s = open(o);
    int64_t came = 0;
    for (int i = 0; i < 120; ++i) {
      const std::string salt(size_t(pick(0, 1)), 'x');
      Tokens t;
      for (int64_t blocks = pick(1, 4); blocks > 0; --blocks) t.resize(t.size() + 64, int32_t(pick(0, 1)));
      if (pick(0, 1))
        put(*s, salt, t);
      else
        came += take(*s, salt, t);
      s->check_invariants();
      error = pick(0, 9) ? 0 : pick(0, 1) ? EIO : ENOSPC;
      if (pick(0, 19) == 0) {
        s.reset();
        error = 0;
        o.file.bytes = kHead + pick(1, 12) * (kSlot + kEntry);
        s = open(o);
      }
    }
    EXPECT_GT(came, 0) << seed;
  }
}

}  // namespace
}  // namespace mi::runtime::kv
