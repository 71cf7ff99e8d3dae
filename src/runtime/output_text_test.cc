#include "runtime/output_text.h"

#include <gtest/gtest.h>

#include "runtime/testing.h"

namespace mi::runtime {
namespace {

// 1 "ab", 2 "#", 3 "##x", 4 and 5 the halves of U+1F600, 6 to 7 U+6F22 as 1 + 2 bytes, 8 blank + first byte of U+6F22.
std::shared_ptr<const text::Tokenizer> piece_tokenizer() {
  static auto t = testing::make_tokenizer({"ab", "#", "##x", "\xf0\x9f", "\x98\x80", "\xe6", "\xbc\xa2", " \xe6"});
  return t;
}

std::string run(OutputText& o, const std::vector<int32_t>& ids) {
  std::string out;
  for (int32_t id : ids) {
    if (!o.stopped_by()) out += o.push(id);
  }
  return out + o.finish();
}

TEST(OutputText, CharactersOverTokensAreWhole) {
  OutputText o(piece_tokenizer(), true, {}, 0);
  EXPECT_EQ(o.push(1), "ab");
  EXPECT_EQ(o.push(4), "");
  EXPECT_EQ(o.push(5), "\xf0\x9f\x98\x80");
  EXPECT_EQ(o.push(8), " ");
  EXPECT_EQ(o.push(7), "\xe6\xbc\xa2");
  EXPECT_EQ(o.push(4), "");
  EXPECT_EQ(o.finish(), "\xef\xbf\xbd");  // cut by the limit inside a character
}

TEST(OutputText, StopInAndAcrossTokensAndCharacters) {
  OutputText across(piece_tokenizer(), true, {"b##"}, 0);
  EXPECT_EQ(run(across, {1, 2, 2, 1}), "a");
  EXPECT_EQ(across.stopped_by(), "b##");
  OutputText inside(piece_tokenizer(), true, {"x"}, 0);
  EXPECT_EQ(run(inside, {1, 3, 1}), "ab##");
  OutputText cjk(piece_tokenizer(), true, {"\xe6\xbc\xa2"}, 0);
  EXPECT_EQ(run(cjk, {1, 8, 7, 1}), "ab ");
  OutputText none(piece_tokenizer(), true, {"b#never"}, 0);
  EXPECT_EQ(run(none, {1, 2}), "ab#");
  EXPECT_FALSE(none.stopped_by());
}

TEST(OutputText, NoStopWithinTheFirstTokens) {
  OutputText o(piece_tokenizer(), true, {"#"}, 2);
  EXPECT_EQ(run(o, {2, 2, 1, 2, 1}), "##ab");
  EXPECT_EQ(o.stopped_by(), "#");
}

TEST(OutputText, SomeSpecialTokensMayLeaveText) {
  OutputText hidden(piece_tokenizer(), true, {}, 0), shown(piece_tokenizer(), true, {}, 0, {0}),
      other(piece_tokenizer(), true, {}, 0, {7});
  EXPECT_EQ(run(hidden, {1, 0, 1}), "abab");
  EXPECT_EQ(run(shown, {1, 0, 1}), "ab</s>ab");
  EXPECT_EQ(run(other, {1, 0, 4, 5}), "ab\xf0\x9f\x98\x80");
}

TEST(OutputText, WithoutTokenizerThereIsNoText) {
  OutputText o(nullptr, true, {}, 0);
  EXPECT_EQ(o.push(1), "");
  EXPECT_EQ(o.finish(), "");
}

}  // namespace
}  // namespace mi::runtime
