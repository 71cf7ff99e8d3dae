#include "runtime/kv/cache.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>

#include "runtime/testing.h"

namespace mi::runtime::kv {
namespace {

std::vector<int32_t> tokens(int64_t n, int32_t first = 0) {
  std::vector<int32_t> t;
  for (int64_t i = 0; i < n; ++i) t.push_back(int32_t(i) + (i == 0 ? first : 0));
  return t;
}

void compute(Cache& c, PageTable* t, std::span<const int32_t> all, std::string_view salt = "") {
  MI_CHECK(c.cover(t, int64_t(all.size())));
  c.publish(t, salt, all, int64_t(all.size()));
  c.check_invariants();
}

TEST(KvCache, WholePagesAreFoundByTheirTokensAndSalt) {
  Cache c(10, true);
  PageTable a, b;
  const auto text = tokens(200);
  compute(c, &a, text, "s");
  EXPECT_EQ(c.match(&b, "s", text), 192);
  EXPECT_TRUE(std::equal(b.pages().begin(), b.pages().end(), a.pages().begin()));
  EXPECT_EQ(c.used_pages(), 4) << "shared pages count once";
  c.release(&b);
  EXPECT_EQ(c.match(&b, "s", std::span(text).first(192)), 128) << "one token is left to compute";
  c.release(&b);
  EXPECT_EQ(c.match(&b, "", text), 0);
  EXPECT_EQ(c.match(&b, "t", text), 0);
  EXPECT_EQ(c.match(&b, "s", tokens(200, 9)), 0) << "another first token";
  auto other = text;
  other[100] = 0;
  EXPECT_EQ(c.match(&b, "s", other), 64);
  c.check_invariants();
  c.release(&b);
  c.release(&a);
  EXPECT_EQ(c.free_pages(), 10);
  EXPECT_EQ(c.idle_pages(), 3) << "the fourth is not whole";
}

TEST(KvCache, EqualPagesOfTwoSequencesBecomeOne) {
  Cache c(10, true);
  PageTable a, b;
  const auto text = tokens(130);
  ASSERT_TRUE(c.cover(&a, 130));
  ASSERT_TRUE(c.cover(&b, 130));
  EXPECT_EQ(c.used_pages(), 6);
  c.publish(&a, "", text, 130);
  c.publish(&b, "", text, 100);
  EXPECT_EQ(c.used_pages(), 5);
  c.publish(&b, "", text, 130);
  EXPECT_EQ(c.used_pages(), 4);
  EXPECT_EQ(a.pages()[1], b.pages()[1]);
  EXPECT_NE(a.pages()[2], b.pages()[2]) << "not whole yet: both write into it";
  c.check_invariants();
  c.release(&a);
  c.check_invariants();
  c.release(&b);
  EXPECT_EQ(c.free_pages(), 10);
}

TEST(KvCache, TheLeastRecentlyUsedMakesRoomFromItsEnd) {
  std::vector<int32_t> freed;
  Cache c(6, true, [&](std::span<const int32_t> p) { freed.insert(freed.end(), p.begin(), p.end()); });
  PageTable a, b, n;
  const auto first = tokens(193, 1), second = tokens(129, 2);
  compute(c, &a, first);
  const std::vector<int32_t> old(a.pages().begin(), a.pages().end());
  c.release(&a);
  freed.clear();
  compute(c, &b, second);
  c.release(&b);
  freed.clear();
  ASSERT_TRUE(c.cover(&n, 128));
  EXPECT_EQ(freed, (std::vector<int32_t>{old[2]})) << "one page was free, one is given up";
  EXPECT_EQ(c.given_up(), 1u);
  EXPECT_EQ(c.match(&a, "", first), 128) << "what stood before it is still found, and now used last";
  c.release(&a);
  c.release(&n);
  ASSERT_TRUE(c.cover(&n, 3 * 64));
  c.check_invariants();
  EXPECT_EQ(c.match(&a, "", first), 128);
  EXPECT_EQ(c.match(&b, "", second), 64);
  c.check_invariants();
  EXPECT_FALSE(c.cover(&n, 5 * 64)) << "what is held is not given up";
  EXPECT_EQ(n.size(), 3);
  for (PageTable* t : {&a, &b, &n}) c.release(t);
}

TEST(KvCache, WithoutReuseNothingIsFound) {
  Cache c(4, false);
  PageTable a, b;
  compute(c, &a, tokens(200));
  EXPECT_EQ(c.match(&b, "", tokens(200)), 0);
  c.release(&a);
  EXPECT_EQ(c.idle_pages(), 0);
  EXPECT_EQ(c.free_pages(), 4);
}

// Against what was written: a page that is taken over holds exactly the tokens before its end, under the same salt.
TEST(KvCache, RandomSequencesNeverGetAPageOfOtherTokens) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    testing::Pick pick(seed);
    const int64_t pages = pick(4, 24);
    Cache c(pages, true);
    struct Live {
      PageTable table;
      std::string salt;
      std::vector<int32_t> tokens;
      int64_t computed = 0;
    };
    std::vector<std::unique_ptr<Live>> live;
    std::map<int32_t, std::vector<int32_t>> written;  // by page: salt, then all tokens up to its end
    int64_t found = 0;
    for (int i = 0; i < 400; ++i) {
      if (live.size() < 4 && pick(0, 1) == 0) {
        auto l = std::make_unique<Live>();
        l->salt = std::string(size_t(pick(0, 1)), 'x');
        // Few different blocks, so that sequences begin alike and part again.
        for (int64_t blocks = pick(1, 5); blocks > 0; --blocks) l->tokens.resize(l->tokens.size() + 64, int32_t(pick(0, 1)));
        l->tokens.resize(l->tokens.size() + size_t(pick(1, 63)), 7);
        l->computed = c.match(&l->table, l->salt, l->tokens);
        found += l->computed;
        if (c.cover(&l->table, int64_t(l->tokens.size())))
          live.push_back(std::move(l));
        else
          c.release(&l->table);
      }
      if (live.empty()) continue;
      const size_t at = size_t(pick(0, int64_t(live.size()) - 1));
      Live& l = *live[at];
      if (l.computed < int64_t(l.tokens.size())) {
        const int64_t end = std::min<int64_t>(l.computed + pick(1, 100), int64_t(l.tokens.size()));
        for (int64_t p = l.computed / 64; p <= (end - 1) / 64; ++p) {
          std::vector<int32_t> what = {int32_t(l.salt.size())};
          what.insert(what.end(), l.tokens.begin(), l.tokens.begin() + std::min<int64_t>((p + 1) * 64, end));
          written[l.table.pages()[size_t(p)]] = what;
        }
        l.computed = end;
        c.publish(&l.table, l.salt, l.tokens, end);
      }
      for (const auto& q : live) {
        for (int64_t p = 0; p < q->computed / 64; ++p) {
          std::vector<int32_t> want = {int32_t(q->salt.size())};
          want.insert(want.end(), q->tokens.begin(), q->tokens.begin() + (p + 1) * 64);
          ASSERT_EQ(written[q->table.pages()[size_t(p)]], want) << seed;
        }
      }
      if (pick(0, 5) == 0) {
        c.release(&l.table);
        live.erase(live.begin() + std::ptrdiff_t(at));
      }
      c.check_invariants();
    }
    EXPECT_GT(found, 0) << seed;
    for (auto& l : live) c.release(&l->table);
    c.check_invariants();
    EXPECT_EQ(c.free_pages(), pages);
  }
}

}  // namespace
}  // namespace mi::runtime::kv
