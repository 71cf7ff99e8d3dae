#include "runtime/stop_matcher.h"

#include <gtest/gtest.h>

#include "base/util.h"

namespace mi::runtime {
namespace {

// Feeds the text in pieces of the given size; what came out, and after each push nothing beyond `limit`.
std::string run(StopMatcher& m, const std::string& text, size_t piece) {
  std::string out;
  for (size_t i = 0; i < text.size() && !m.matched(); i += piece)
    out += m.push(std::string_view(text).substr(i, piece));
  return out + m.finish();
}

TEST(StopMatcher, NoStopsPassEverythingAtOnce) {
  StopMatcher m({"", ""});
  EXPECT_EQ(m.push("abc"), "abc");
  EXPECT_EQ(m.finish(), "");
  EXPECT_FALSE(m.matched());
}

TEST(StopMatcher, StopSpreadOverFourPieces) {
  StopMatcher m({"stopped"});
  EXPECT_EQ(m.push("now st"), "now ");
  EXPECT_EQ(m.push("op"), "");
  EXPECT_EQ(m.push("pe"), "");
  EXPECT_EQ(m.push("d and more"), "");
  EXPECT_EQ(m.matched(), "stopped");
  EXPECT_EQ(m.push("x"), "");
  EXPECT_EQ(m.finish(), "");
}

TEST(StopMatcher, InsideOnePiece) {
  StopMatcher m({"##"});
  EXPECT_EQ(m.push("ab##cd"), "ab");
  EXPECT_EQ(m.matched(), "##");
}

TEST(StopMatcher, HoldsOnlyWhatMayBecomeAStop) {
  StopMatcher m({"abcdef"});
  EXPECT_EQ(m.push("xxab"), "xx");
  EXPECT_EQ(m.push("cz"), "abcz");
  EXPECT_EQ(m.push("aab"), "a");  // the second a may begin it
}

TEST(StopMatcher, HeldTextIsFlushedAtTheEnd) {
  StopMatcher m({"\n\nUser:"});
  EXPECT_EQ(m.push("bye\n\nUs"), "bye");
  EXPECT_EQ(m.finish(), "\n\nUs");
  EXPECT_FALSE(m.matched());
}

TEST(StopMatcher, OneIsPrefixOfTheOther) {
  StopMatcher m({"endnever", "end"});
  EXPECT_EQ(m.push("the e"), "the ");
  EXPECT_EQ(m.push("nd"), "");
  EXPECT_EQ(m.matched(), "end");

  for (const auto& stops : {std::vector<std::string>{"end", "endn"}, {"endn", "end"}}) {
    StopMatcher both(stops);
    EXPECT_EQ(both.push("the endnote"), "the ");
    EXPECT_EQ(both.matched(), "end");
  }
}

TEST(StopMatcher, EarliestStartWinsEvenIfCompleteLater) {
  StopMatcher m({"bc", "abcd"});
  EXPECT_EQ(m.push("xabc"), "x");
  EXPECT_FALSE(m.matched());
  EXPECT_EQ(m.push("d"), "");
  EXPECT_EQ(m.matched(), "abcd");

  StopMatcher other({"bc", "abcd"});
  EXPECT_EQ(other.push("xabc"), "x");
  EXPECT_EQ(other.push("e"), "a");  // abcd failed: bc it is
  EXPECT_EQ(other.matched(), "bc");

  StopMatcher ended({"bc", "abcd"});
  EXPECT_EQ(ended.push("xabc"), "x");
  EXPECT_EQ(ended.finish(), "a");
  EXPECT_EQ(ended.matched(), "bc");
}

TEST(StopMatcher, SelfOverlap) {
  StopMatcher m({"aab"});
  EXPECT_EQ(m.push("aaa"), "a");
  EXPECT_EQ(m.push("b"), "");
  EXPECT_TRUE(m.matched());
}

// Against the plain definition: text up to the smallest position at which any stop string is found.
TEST(StopMatcher, RandomTextsEqualAWholeTextSearch) {
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    uint64_t i = 0;
    auto pick = [&](uint64_t n) { return random_u64(seed, i++) % n; };
    auto word = [&](uint64_t most) {
      std::string w;
      for (uint64_t n = 1 + pick(most); n > 0; --n) w += char('a' + pick(2));
      return w;
    };
    std::string text = word(24);
    std::vector<std::string> stops;
    for (uint64_t n = 1 + pick(4); n > 0; --n) stops.push_back(word(6));
    size_t cut = std::string::npos;
    for (const std::string& s : stops) cut = std::min(cut, text.find(s));
    StopMatcher m(stops);
    EXPECT_EQ(run(m, text, 1 + pick(5)), text.substr(0, cut)) << seed;
    EXPECT_EQ(m.matched().has_value(), cut != std::string::npos) << seed;
  }
}

}  // namespace
}  // namespace mi::runtime
